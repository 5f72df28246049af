"""`depthbench export`: the checkpoint's weights bit for bit, what the file says of itself, and one line for every mistake."""

from __future__ import annotations

import json
import shutil
import stat
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from depthbench import build_model
from depthbench.training import checkpoints
from tests.app.conftest import write

SHAPE = {"n_layer": 2, "d_model": 16, "n_head": 2, "n_kv_head": 1, "d_ff": 32, "vocab_size": 64}
OPTIONS = {"streams": 2}


def save(folder: Path, step: int, model: torch.nn.Module, **more) -> dict[str, torch.Tensor]:
    """Writes a checkpoint as Lightning lays it out; returns its weights."""
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    checkpoints.folder(folder).mkdir(exist_ok=True)
    stored = {f"model.{name}": tensor for name, tensor in weights.items()} | more
    torch.save({"state_dict": stored, "optimizer_states": [{"step": step}]}, checkpoints.path(folder, step))
    return weights


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    config = json.dumps({"recipe": {"norm_eps": 1e-5}, "options": OPTIONS})
    folder = write(tmp_path_factory.mktemp("recorded"), arch="hc", options=json.dumps(OPTIONS), config=config, **SHAPE).folder
    model = build_model("hc", **SHAPE, norm_eps=1e-5, **OPTIONS)
    weights = {20: save(folder, 20, model)}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return folder, weights | {40: save(folder, 40, model, **{"loss.scale": torch.ones(1)})}


@pytest.fixture
def run(recorded, tmp_path):
    """(run folder, weights by step) of a run with two checkpoints, never trained."""
    folder, weights = recorded
    return shutil.copytree(folder, tmp_path / folder.name), weights


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Same names, shapes, types and bits."""

    def written(weights):
        return {name: (t.shape, t.dtype, t.contiguous().flatten().view(torch.uint8).numpy().tobytes()) for name, t in weights.items()}

    return written(found) == written(expected)


def test_the_file_holds_the_newest_checkpoint_bit_for_bit(says, run):
    folder, weights = run
    code, out, err = says("export", "hc", "--runs", folder.parent)
    file = folder / "step-00000040.safetensors"
    assert (code, err) == (0, "") and out.startswith(f"{file}: {len(weights[40])} tensors, ") and out.endswith("of step 40\n")
    found = load_file(file)
    assert equal(found, weights[40]) and not equal(found, weights[20])
    assert not list(folder.glob(".*.tmp")) and stat.S_IMODE(file.stat().st_mode) == checkpoints.usual_mode()


def test_its_metadata_builds_the_model(says, run, tmp_path):
    folder, weights = run
    assert says("export", folder, "--step", "20", "--out", tmp_path / "out" / "it.safetensors")[0] == 0
    with safe_open(tmp_path / "out" / "it.safetensors", "pt") as file:
        facts = file.metadata()
    assert facts["run_id"] == folder.name and (facts["arch"], facts["step"], facts["tokenizer"]) == ("hc", "20", "bpe-2048")
    shape = {name: int(facts[name]) for name in SHAPE}
    model = build_model(facts["arch"], **shape, norm_eps=float(facts["norm_eps"]), **json.loads(facts["options"]))
    model.load_state_dict(load_file(tmp_path / "out" / "it.safetensors"))
    assert shape == SHAPE and model.config.norm_eps == 1e-5 and equal(model.state_dict(), weights[20])


def test_other_types_and_shared_tensors_are_kept(says, run):
    folder, _ = run
    tied = torch.randn(4, 3, dtype=torch.float64)
    expected = {"a": tied, "b": tied, "c": tied.T, "d": torch.tensor([float("nan"), float("inf")], dtype=torch.bfloat16)}
    torch.save({"state_dict": {f"model.{name}": tensor for name, tensor in expected.items()}}, checkpoints.path(folder, 60))
    assert says("export", folder)[0] == 0
    assert equal(load_file(folder / "step-00000060.safetensors"), expected)


def test_a_checkpoint_is_never_unpickled_and_one_that_asks_for_it_is_named(says, run, tmp_path):
    folder, _ = run

    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "sprung",)

    torch.save({"state_dict": Trap()}, checkpoints.path(folder, 60))
    code, _, err = says("export", folder, "--step", "60")
    assert code == 2 and "step-00000060.ckpt is no checkpoint of depthbench's" in err and err.count("\n") == 1
    assert not (tmp_path / "sprung").exists() and not list(folder.glob("*.safetensors"))


def test_a_disk_that_refuses_is_one_line_and_leaves_nothing(says, run, tmp_path, monkeypatch):
    folder, _ = run
    (tmp_path / "file").write_text("")
    assert_one_line(says("export", folder, "--out", tmp_path / "file" / "it.safetensors"), "cannot write")

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise sys.modules["safetensors"].SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    assert_one_line(says("export", folder, "--out", tmp_path / "it.safetensors"), "No space left on device")
    assert not [path for path in tmp_path.iterdir() if "it.safetensors" in path.name]


def test_mistakes_are_one_line(says, run, tmp_path):
    folder, _ = run
    assert_one_line(says("export", folder, "--step", "30"), "no checkpoint at step 30: it has 20, 40")
    assert_one_line(says("export", folder, "--out", tmp_path / "it.bin"), "ends in .safetensors")
    assert_one_line(says("export", "nothing", "--runs", folder.parent), "nothing")
    assert_one_line(says("export"), "RUN")
    assert_one_line(says("export", write(tmp_path, arch="keel").folder), "no whole checkpoint")


def assert_one_line(answer: tuple[int, str, str], part: str) -> None:
    code, _, err = answer
    assert code == 2 and err.count("\n") == 1 and part in err, err
