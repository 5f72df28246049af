"""`depthbench resume RUN`: it needs nothing but the run, and refuses to go on as another one, naming both values."""

import os
import shutil

import pytest

from depthbench import corpora
from depthbench.store.reader import Store, read_run
from depthbench.training import checkpoints
from tests.conftest import text_corpus
from tests.faults.tiny_run import Trial, command


@pytest.fixture
def own_corpus(tmp_path_factory):
    """Of its own: the test changes it."""
    return text_corpus(tmp_path_factory, texts=6)


@pytest.fixture
def interrupted(own_corpus, tmp_path, says, monkeypatch):
    """A run that was stopped after step 4 of 12."""
    run = Trial(own_corpus, tmp_path, says, monkeypatch)
    run.attempt("train:4:SIGTERM")
    monkeypatch.setenv("WITNESS_STOP", "")
    return run


def test_the_run_is_enough_and_what_decides_no_result_may_change(interrupted, says):
    code, out, err = says("resume", interrupted.folder.name[:12], "--runs", interrupted.runs, "--loader_timeout", "60")
    assert code == 0 and "going on from the checkpoint at step 4" in out, err
    assert Store(interrupted.runs).runs()[["status", "n_attempts"]].values.tolist() == [["finished", 2]]
    assert [path.name for path in interrupted.runs.iterdir() if path.is_dir()] == [interrupted.folder.name]

    code, out, _ = says("resume", interrupted.folder)
    assert code == 0 and "already finished" in out
    code, out, _ = says(*interrupted.command)
    assert code == 0 and "already finished" in out


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (["--recipe", "reference"], ["recipe", "paper", "reference"]),
        (["--lr", "0.001"], ["--lr 0.004", "0.001"]),
        (["--seed", "7"], ["--seed 42", "7"]),
        (["--arch", "keel"], ["--arch pre_ln", "keel"]),
        (["--micro-batch", "4"], ["--micro-batch 16", "4"]),
        (["--batch-tokens", "4096"], ["--batch-tokens 2048", "4096"]),
        (["--tokens", str(2048 * 20)], ["--tokens 24576", "40960"]),
        (["--trainer.max_steps", "9"], ["--trainer.max_steps 12", "9"]),
        (["--trainer.precision", "64-true"], ["--trainer.precision 32-true", "64-true"]),
        (["--trainer.devices", "2"], ["world size 1", "2"]),
    ],
)  # fmt: skip
def test_another_run_is_refused_naming_both_values(interrupted, says, changed, named):
    before = {path: path.read_bytes() for path in interrupted.folder.rglob("*") if path.is_file()}
    code, _, err = says("resume", interrupted.folder, *changed)
    assert code == 2 and err.count("\n") == 1
    assert all(name in err for name in named), err
    assert {path: path.read_bytes() for path in interrupted.folder.rglob("*") if path.is_file()} == before


def test_a_corpus_that_is_another_one_now_is_refused_naming_both_fingerprints(interrupted, own_corpus, tmp_path_factory, says):
    before = corpora.read_card(own_corpus).fingerprint
    another = text_corpus(tmp_path_factory, texts=7)
    shutil.rmtree(own_corpus)
    os.rename(another, own_corpus)
    after = corpora.read_card(own_corpus).fingerprint
    code, _, err = says("resume", interrupted.folder)
    assert code == 2 and err.count("\n") == 1 and before in err and after in err


def test_a_corpus_with_a_flipped_byte_is_refused_naming_the_file(interrupted, own_corpus, says):
    chunk = sorted(own_corpus.rglob("*.bin"))[0]
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 1
    chunk.write_bytes(content)
    code, _, err = says("resume", interrupted.folder)
    assert code == 2 and err.count("\n") == 1 and chunk.name in err


def test_a_run_without_a_checkpoint_is_refused(interrupted, says):
    shutil.rmtree(checkpoints.folder(interrupted.folder))
    code, _, err = says("resume", interrupted.folder)
    assert code == 2 and err.count("\n") == 1 and "no whole checkpoint" in err


@pytest.mark.parametrize("cut", [0.0, 0.3, 0.9])
def test_a_configuration_that_is_cut_short_is_refused_and_not_filled_with_defaults(interrupted, says, cut):
    config = interrupted.folder / "config.yaml"
    lines = config.read_text().splitlines(keepends=True)
    config.write_text("".join(lines[: int(cut * len(lines))]))
    code, _, err = says("resume", interrupted.folder)
    assert code == 2 and err.count("\n") == 1 and f"the config.yaml of run {interrupted.folder.name} is not whole, it lacks " in err


@pytest.mark.parametrize("where", [".", "..", "../{name}", "{name}/."])
def test_a_run_goes_by_the_name_of_its_folder_however_that_is_called(interrupted, says, monkeypatch, where):
    folder = interrupted.folder
    inside = {".": folder, "..": folder / "checkpoints", "../{name}": folder, "{name}/.": folder.parent}[where]
    monkeypatch.chdir(inside)
    code, out, err = says("resume", where.format(name=folder.name))
    assert code == 0 and "going on from the checkpoint at step 4" in out, err
    assert Store(interrupted.runs).runs()[["run_id", "status"]].values.tolist() == [[folder.name, "finished"]]
    assert says("runs", "show", where.format(name=folder.name))[0] == 0


def test_a_renamed_run_goes_on_under_its_new_name(interrupted, says):
    renamed = interrupted.folder.rename(interrupted.runs / "mine")
    code, out, err = says("resume", renamed, "--probes", "norms")
    assert code == 0 and "probes: norms" in out, err
    assert Store(interrupted.runs).runs()[["run_id", "status"]].values.tolist() == [["mine", "finished"]]
    assert len(Store(interrupted.runs).probes(["mine"]))


@pytest.mark.parametrize("name", ["what?", "back\\slash", ".hidden"])
def test_a_folder_whose_name_cannot_be_written_or_listed_is_refused_at_once(interrupted, says, name):
    renamed = interrupted.folder.rename(interrupted.runs / name)
    before = {path: path.read_bytes() for path in renamed.rglob("*") if path.is_file()}
    code, _, err = says("resume", renamed)
    assert code == 2 and err.count("\n") == 1 and name in err and "name" in err, err
    assert {path: path.read_bytes() for path in renamed.rglob("*") if path.is_file()} == before


def test_options_are_named_by_what_they_are_by_default(own_corpus, tmp_path, says, monkeypatch):
    run = Trial(own_corpus, tmp_path, says, monkeypatch)
    run.command += ["--arch", "hc"]
    run.attempt("train:4:SIGTERM")
    code, _, err = says("resume", run.folder, "--arch.streams", "2")
    assert code == 2 and "options.streams 4, and 2 is asked for" in err


@pytest.mark.parametrize("content", [None, b"lr: [", b"\xff\xfe\x00lr"])
def test_a_run_without_a_readable_configuration_is_refused(interrupted, says, content):
    config = interrupted.folder / "config.yaml"
    config.unlink()
    if content is not None:
        config.write_bytes(content)
    code, _, err = says("resume", interrupted.folder)
    assert code == 2 and err.count("\n") == 1 and "no readable config.yaml" in err
    assert checkpoints.newest(interrupted.folder)[0] == 4


def test_a_run_that_is_not_there_is_refused(tmp_path, says):
    code, _, err = says("resume", "pre_ln", "--runs", tmp_path)
    assert code == 2 and err.count("\n") == 1 and "pre_ln" in err


def test_fit_with_another_recipe_is_another_run(interrupted, own_corpus, says):
    run_id = interrupted.folder.name
    code, _, err = says(*command(own_corpus, interrupted.runs), "--recipe", "reference", "--trainer.max_steps", "1")
    assert code == 0, err
    assert read_run(interrupted.runs / run_id)["status"] == "interrupted"
    assert len(Store(interrupted.runs).runs()) == 2
