"""A run folder of which a part is gone: what is lost is said, what is there is kept."""

import shutil
from pathlib import Path

import pytest

from depthbench.store.folder import SEALED, SEGMENTS
from depthbench.store.reader import Store
from depthbench.training import checkpoints
from tests.faults.tiny_run import assert_same


@pytest.fixture
def interrupted(trial):
    """A run stopped after step 4 of 12; its rows are all in the sealed file."""
    run = trial()
    run.attempt("train:4:SIGTERM")
    run.monkeypatch.setenv("WITNESS_STOP", "")
    return run


def lose_all_rows(folder):
    (folder / SEALED).unlink()
    shutil.rmtree(folder / SEGMENTS, ignore_errors=True)


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def test_without_its_rows_a_run_is_not_gone_on_with(interrupted, says):
    folder = interrupted.folder
    lose_all_rows(folder)
    before = files_of(folder)
    code, _, err = says(*interrupted.command)
    assert code == 2 and err.count("\n") == 1 and "has checkpoints, and what the run recorded is gone" in err and "--fresh" in err
    code, _, err = says("resume", folder)
    assert code == 2 and err.count("\n") == 1 and f"{folder} holds no rows of a run" in err
    assert files_of(folder) == before


def test_fresh_keeps_whatever_the_folder_holds_aside(interrupted, uninterrupted, says):
    lose_all_rows(interrupted.folder)
    names = sorted(path.name for path in checkpoints.folder(interrupted.folder).iterdir())
    interrupted.file.unlink()
    code, out, err = says(*interrupted.command, "--fresh")
    assert code == 0 and ".aside" in out, err
    (kept,) = (interrupted.runs / ".aside").iterdir()
    assert sorted(path.name for path in checkpoints.folder(kept).iterdir()) == names
    assert_same(interrupted.result(), uninterrupted())


@pytest.mark.parametrize("there", ["a file", "a folder that cannot be written"])
def test_where_nothing_can_be_kept_aside_nothing_happens(interrupted, says, monkeypatch, there):
    aside = interrupted.runs / ".aside"
    if there == "a file":
        aside.write_text("")
    else:
        monkeypatch.setattr("os.rename", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))  # root may do all
    before = files_of(interrupted.folder)
    code, _, err = says(*interrupted.command, "--fresh")
    assert code == 2 and err.count("\n") == 1 and f"cannot be kept aside in {aside}" in err
    assert files_of(interrupted.folder) == before


def damage(segment):
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)


@pytest.mark.parametrize(("lose", "why"), [(damage, "damaged"), (Path.unlink, "files were removed")])
def test_of_lost_rows_the_steps_are_counted_when_the_run_goes_on(trial, monkeypatch, lose, why):
    run = trial()
    with monkeypatch.context() as killed:
        killed.setattr("depthbench.store.writer.seal_run", lambda folder: None)  # as after a kill: its segments stay
        run.attempt("train:4:SIGTERM")
    for segment in (run.folder / SEGMENTS).glob("scalars-*"):
        lose(segment)
    said = run.attempt()
    (told,) = [line for line in said.splitlines() if line.startswith("depthbench:")]
    assert told.startswith("depthbench: 4 of the 4 steps before the checkpoint are not on record (") and why in told and "--fresh" in told
    losses = Store(run.runs).scalars([run.folder.name], ["train/loss"])
    assert losses.step.tolist() == list(range(5, 13))
