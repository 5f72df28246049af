"""`fit` as a whole, on a tiny corpus: what is recorded, and what a repeated or changed command does."""

import json
import math
import re
import shutil
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import yaml
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator

from depthbench import load_run, residuals
from depthbench.store.reader import Store


@pytest.fixture(scope="session")
def trained(tiny_corpus, tmp_path_factory):
    """One finished run of 24 steps: (runs folder, run id, exit code, output)."""
    from depthbench.cli import main

    runs = tmp_path_factory.mktemp("runs")
    assert main(command(tiny_corpus, runs)) == 0
    (run_id,) = [folder.name for folder in runs.iterdir() if not folder.name.startswith(".")]
    return runs, run_id


def command(corpus, runs, *more):
    return [
        "fit", "--size", "pico", "--corpus", str(corpus), "--runs", str(runs), "--tokens", str(24 * 2048), "--validations", "3",
        "--trainer.accelerator", "cpu", *more,
    ]  # fmt: skip


def scalar(runs, run_id, name):
    return Store(runs).scalars([run_id], [name]).sort_values("step")


def test_every_step_is_recorded_with_tokens_and_time(trained):
    rows = scalar(*trained, "train/loss")
    assert rows.step.tolist() == list(range(1, 25))
    assert rows.tokens.tolist() == [2048 * step for step in range(1, 25)]
    assert rows.wall_s.is_monotonic_increasing and rows.wall_s.iloc[0] > 0
    assert rows.value.iloc[0] == pytest.approx(math.log(512), abs=0.3)
    assert rows.value.iloc[-1] < rows.value.iloc[0] - 0.5


def test_learning_rates_are_the_schedules(trained):
    from depthbench.training.schedule import learning_rate_factor

    expected = [4e-3 * learning_rate_factor(t, total_steps=24, warmup_fraction=0.1, final_fraction=0.1) for t in range(24)]
    assert scalar(*trained, "train/lr").value.tolist() == pytest.approx(expected, rel=1e-12)


def test_gradient_norms_before_and_after_clipping(trained):
    before, after = (scalar(*trained, name).value for name in ("train/grad_norm", "train/grad_norm_clipped"))
    assert after.tolist() == pytest.approx(before.clip(upper=1.0).tolist(), rel=1e-5)


def test_it_validates_evenly_and_at_the_end(trained):
    assert scalar(*trained, "val/loss").step.tolist() == [8, 16, 24]
    losses = scalar(*trained, "val/loss").value
    assert scalar(*trained, "val/perplexity").value.tolist() == pytest.approx(losses.map(math.exp).tolist(), rel=1e-6)


def test_the_run_row_is_complete(trained):
    runs, run_id = trained
    row = Store(runs).runs().set_index("run_id").loc[run_id]
    assert (row.status, row.arch, row["size"], row.n_layer, row.d_model, row.seed, row.tokens_planned) == (
        "finished",
        "pre_ln",
        "pico",
        9,
        52,
        42,
        24 * 2048,
    )
    assert row.params_total == sum(p.numel() for p in load_run(run_id, runs=runs).model.parameters())
    assert row.val_loss == scalar(runs, run_id, "val/loss").value.iloc[-1]


def test_layer_statistics_and_skip_ablations_are_there(trained):
    runs, run_id = trained
    heat = Store(runs).layer_stats(run_id, "norm", "block_out", "backward")
    assert sorted(heat.step.unique()) == [1, 10, 20, 24]
    assert sorted(heat.layer.unique()) == list(range(9))
    assert heat.value.gt(0).all()
    skips = Store(runs).layer_stats(run_id, "skip_delta", "block_out", "forward")
    assert sorted(skips.step.unique()) == [0, 12, 24]


def test_validate_measures_what_was_recorded(trained, says):
    runs, run_id = trained
    code, out, _ = says("validate", run_id, "--runs", runs)
    recorded = scalar(runs, run_id, "val/loss").value.iloc[-1]
    assert code == 0 and f"validation loss {recorded:.6f}" in out


def test_validation_does_not_depend_on_the_batch(trained):
    from depthbench.training.module import next_token_loss

    runs, run_id = trained
    run = load_run(run_id[:-2], runs=runs)
    blocks = torch.stack([run.held_out[i] for i in range(len(run.held_out))])
    means = []
    for size in (1, 3, 8):
        run.data.val_batch = size
        module_loss = torch.tensor(0.0, dtype=torch.float64)
        with torch.no_grad():
            for batch in run.data.val_dataloader():
                module_loss += next_token_loss(run.model, batch, reduction="none").double().sum()
        means.append(module_loss.item() / blocks[:, 1:].numel())
    assert means == pytest.approx([means[0]] * 3, abs=1e-6)
    assert scalar(runs, run_id, "val/loss").value.iloc[-1] == pytest.approx(means[0], abs=1e-6)


def test_the_same_command_again_says_it_is_finished(trained, tiny_corpus, says):
    runs, run_id = trained
    before = scalar(runs, run_id, "train/loss")
    code, out, _ = says(*command(tiny_corpus, runs))
    assert code == 0 and f"Run {run_id} is already finished" in out
    pd.testing.assert_frame_equal(scalar(runs, run_id, "train/loss"), before)


def test_its_config_file_names_the_same_run(trained, says):
    runs, run_id = trained
    code, out, _ = says("fit", "--config", runs / run_id / "config.yaml")
    assert code == 0 and f"Run {run_id} is already finished" in out
    assert yaml.safe_load((runs / run_id / "config.yaml").read_text())["arch"] == "pre_ln"


def test_micro_batches_change_neither_losses_nor_learning_rates(trained, tiny_corpus, tmp_path, says):
    runs, run_id = trained
    code, _, err = says(*command(tiny_corpus, tmp_path, "--micro-batch", "4"))
    assert code == 0, err
    for name in ("train/loss", "train/lr", "val/loss"):
        assert scalar(tmp_path, run_id, name).value.tolist() == pytest.approx(scalar(runs, run_id, name).value.tolist(), abs=1e-5)
        assert scalar(tmp_path, run_id, name).step.tolist() == scalar(runs, run_id, name).step.tolist()


def test_stopping_early_keeps_the_schedule(trained, tiny_corpus, tmp_path, says):
    runs, run_id = trained
    code, out, err = says(
        *command(
            tiny_corpus,
            tmp_path,
            "--trainer.max_steps",
            "6",
            "--trainer.logger",
            "CSVLogger",
            "--trainer.logger.save_dir",
            str(tmp_path / "csv"),
        )
    )
    assert code == 0, err
    (early,) = Store(tmp_path).runs().run_id
    assert scalar(tmp_path, early, "train/lr").value.tolist() == scalar(runs, run_id, "train/lr").value.tolist()[:6]
    assert scalar(tmp_path, early, "train/loss").value.tolist() == scalar(runs, run_id, "train/loss").value.tolist()[:6]
    assert scalar(tmp_path, early, "val/loss").step.tolist()[-1] == 6
    (metrics,) = (tmp_path / "csv").rglob("metrics.csv")
    assert "train/loss" in pd.read_csv(metrics).columns
    assert "validation loss" in out and "depthbench app --runs" in out


def test_fresh_starts_over_and_keeps_the_old_folder(trained, tiny_corpus, tmp_path, says):
    more = ("--trainer.max_steps", "2")
    assert says(*command(tiny_corpus, tmp_path, *more))[0] == 0
    (run_id,) = Store(tmp_path).runs().run_id
    code, out, _ = says(*command(tiny_corpus, tmp_path, *more, "--fresh"))
    assert code == 0 and ".aside" in out
    assert Store(tmp_path).runs().run_id.tolist() == [run_id]
    assert (next((tmp_path / ".aside").iterdir()) / "metrics.duckdb").exists()


def test_another_micro_batch_is_refused_to_a_run_under_way(tiny_corpus, tmp_path, says, monkeypatch):
    from depthbench.training.interruption import Interrupted, Interruption

    monkeypatch.setattr(Interruption, "on_train_start", lambda self, trainer, module: setattr(self, "received", Interrupted(15)))
    assert says(*command(tiny_corpus, tmp_path))[0] == 143
    monkeypatch.undo()
    monkeypatch.setenv("DEPTHBENCH_DATA", str(tmp_path))
    code, _, err = says(*command(tiny_corpus, tmp_path, "--micro-batch", "4"))
    assert code == 2 and "begun with --micro-batch 16, and 4 is asked for" in err and err.count("\n") == 1


def test_a_run_is_validated_from_any_folder(trained, tiny_corpus, tmp_path, says, monkeypatch):
    monkeypatch.chdir(tiny_corpus.parent)
    code, _, err = says(*command(tiny_corpus.name, tmp_path / "runs", "--trainer.max_steps", "2"))
    assert code == 0, err
    monkeypatch.chdir(tmp_path)
    code, out, err = says("validate", "pre_ln", "--runs", "runs")
    assert code == 0 and "validation loss" in out, err


def damage(corpus, how):
    chunk = sorted((corpus / "train").glob("*.bin"))[0]
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 1
    {"flipped": lambda: chunk.write_bytes(content), "cut": lambda: chunk.write_bytes(content[:-9]), "gone": chunk.unlink}[how]()
    return chunk.name


@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_a_damaged_corpus_is_refused_before_anything_is_made(tiny_corpus, tmp_path, says, how):
    corpus = shutil.copytree(tiny_corpus, tmp_path / "corpus")
    name = damage(corpus, how)
    code, out, err = says(*command(corpus, tmp_path / "runs"))
    assert code == 2 and err.count("\n") == 1 and name in err and "depthbench data prepare" in err
    assert not out and not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_main_job(tmp_path, says):
    """`depthbench fit --arch pre_ln --ratio 32` with nothing else: nano on the embedded corpus."""
    code, out, err = says("fit", "--arch", "pre_ln", "--ratio", "32", "--runs", tmp_path)
    assert code == 0, err
    row = Store(tmp_path).runs().iloc[0]
    data = json.loads(row.config)["data"]
    assert (row["size"], row.seq_len, row.batch_tokens, row.tokens_planned) == ("nano", 256, 1024, 1_024_000)
    assert data["val_blocks"] * row.seq_len == 131_072
    entropy = float(re.search(r"unigram entropy is ([\d.]+)", out)[1])
    assert row.val_loss < entropy - 1.5


def test_a_gpu_gets_bf16_autocast_unless_another_precision_is_asked_for():
    from depthbench.training.cli import parse
    from depthbench.training.trainer import precision_of

    gpu, cpu = (SimpleNamespace(accelerator=kind(), precision="64-true") for kind in (CUDAAccelerator, CPUAccelerator))
    assert precision_of(parse([]), gpu) == "bf16-mixed"
    assert precision_of(parse([]), cpu) == "32-true"
    assert precision_of(parse(["--trainer.precision", "64"]), gpu) == "64-true"


@pytest.mark.parametrize(
    ("arguments", "says_what"),
    [
        (("--trainer.precision", "16-true"), "unknown precision '16-true'"),
        (("--trainer.precision", "bf16-true"), "unknown precision 'bf16-true'"),
        (("--trainer.devices", "2"), "not supported yet"),
        (("--trainer.devices", "abc"), "the trainer cannot start"),
        (("--trainer.precision", "16-mixed"), "unknown precision '16-mixed'"),
        (("--trainer.max_time", "foo"), "'foo'"),
        (("--trainer.max_time", "5"), "DD:HH:MM:SS"),
        (("--trainer.profiler", "nope"), "profiler"),
        (("--runs", ""), "--runs is empty"),
        (("--runs", "back\\slash"), "without question marks and backslashes"),
        (("--tokens", "1e400"), "--tokens is '1e400'"),
        (("--workers", "x"), "give a whole number"),
    ],
)
def test_mistakes_are_one_line(tiny_corpus, tmp_path, says, arguments, says_what):
    code, _, err = says(*command(tiny_corpus, tmp_path, *arguments))
    assert code == 2 and says_what in err and err.count("\n") == 1
    assert not any(tmp_path.rglob("segments"))


def test_a_gpu_that_is_not_there_fails_at_once(tiny_corpus, tmp_path, says):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    code, _, err = says(*command(tiny_corpus, tmp_path, "--trainer.accelerator", "gpu"))
    assert code == 2 and err.count("\n") == 1 and "gpu" in err.lower()
    assert not any(tmp_path.iterdir())


def test_a_runs_folder_that_cannot_be_written(tiny_corpus, tmp_path, says):
    (tmp_path / "file").write_text("in the way")
    code, _, err = says(*command(tiny_corpus, tmp_path / "file"))
    assert code == 2 and err.count("\n") == 1 and "file" in err


def test_bf16_autocast_trains_too(trained, tiny_corpus, tmp_path, says):
    code, _, err = says(*command(tiny_corpus, tmp_path, "--trainer.max_steps", "2", "--trainer.precision", "bf16-mixed"))
    assert code == 0, err
    row = Store(tmp_path).runs().iloc[0]
    assert row.precision == "bf16-mixed"
    exact, rounded = scalar(*trained, "train/loss").value.tolist()[:2], scalar(tmp_path, row.run_id, "train/loss").value.tolist()
    assert rounded == pytest.approx(exact, abs=0.02) and rounded != exact


@pytest.mark.slow
def test_a_compiled_run_is_the_eager_run(trained, tiny_corpus, tmp_path, says):
    runs, run_id = trained
    code, _, err = says(*command(tiny_corpus, tmp_path, "--compile", "true"))
    assert code == 0, err
    assert scalar(tmp_path, run_id, "train/loss").value.tolist() == pytest.approx(
        scalar(runs, run_id, "train/loss").value.tolist(), abs=2e-3
    )
    keys = load_run(run_id, runs=tmp_path).model.state_dict().keys()
    assert keys == load_run(run_id, runs=runs).model.state_dict().keys()


@pytest.mark.parametrize("arch", residuals.names())
def test_every_design_trains_is_recorded_and_loads_again(arch, tiny_corpus, tmp_path, capsys):
    from depthbench.cli import main
    from depthbench.training.runs import validate

    few = ["--arch", arch, "--ratio", "18", "--tokens", str(4 * 2048), "--validations", "1", "--layer-stats-every", "2"]
    assert main(command(tiny_corpus, tmp_path, *few)) == 0
    row = Store(tmp_path).runs().iloc[0]
    assert (row.status, row.arch, row.options) == ("finished", arch, "{}")
    assert validate(row.run_id, runs=tmp_path)["val/loss"] == pytest.approx(row.val_loss, abs=1e-6)
    backward = Store(tmp_path).layer_stats(row.run_id, "norm", "block_out", "backward")
    assert len(backward) and (backward.value > 0).all()


def test_a_run_keeps_its_designs_options(tiny_corpus, tmp_path, capsys):
    from depthbench.cli import main
    from depthbench.training.runs import validate

    few = ["--arch", "hc", "--recipe", "reference", "--arch.streams", "2", "--ratio", "18", "--tokens", str(2 * 2048), "--validations", "1"]
    assert main(command(tiny_corpus, tmp_path, *few)) == 0
    row = Store(tmp_path).runs().iloc[0]
    chosen = {"streams": 2, "norm_then_sum": True, "scale_branch_init": True, "mix_eps": 1e-8}
    assert (row.recipe, json.loads(row.options)) == ("reference", chosen)
    model = load_run(row.run_id, runs=tmp_path).model
    assert model.options == chosen | {"dynamic": True}
    assert validate(row.run_id, runs=tmp_path)["val/loss"] == pytest.approx(row.val_loss, abs=1e-6)
    saved = yaml.safe_load((tmp_path / row.run_id / "config.yaml").read_text())
    assert saved["options"] == chosen | {"dynamic": True}
