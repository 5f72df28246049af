"""Checkpoints that are damaged, missing, or have no room."""

import os
import random
import shutil
import subprocess
import zipfile
from collections import namedtuple
from functools import partialmethod

import pytest
import torch

from depthbench.nn.model import LanguageModel
from depthbench.store.reader import Store
from depthbench.training import checkpoints
from tests.faults.tiny_run import Trial, assert_same, command, equal


def flip(file, at):
    """Change one bit of a file."""
    content = bytearray(file.read_bytes())
    content[at] ^= 0x10
    file.write_bytes(content)


def flip_in_the_middle(file):
    flip(file, file.stat().st_size // 2)


def truncate(file):
    os.truncate(file, file.stat().st_size * 2 // 3)


def empty(file):
    os.truncate(file, 0)


@pytest.mark.parametrize("damage", [flip_in_the_middle, truncate, empty])
def test_a_damaged_checkpoint_is_skipped_and_the_one_before_is_used(trial, uninterrupted, damage):
    run = trial()
    run.attempt("train:8:SIGTERM")
    damaged = checkpoints.path(run.folder, 8)
    damage(damaged)
    said = run.attempt()
    assert f"checkpoint {damaged} is damaged: the one of step 6 is used" in said
    assert "going on from the checkpoint at step 6" in said
    assert_same(run.result(), uninterrupted())
    assert checkpoints.steps(run.folder)[-2:] == [9, 12]


def test_where_every_checkpoint_is_damaged_fit_starts_over_and_resume_refuses(trial, uninterrupted, says):
    run = trial()
    run.attempt("train:4:SIGTERM")
    assert checkpoints.steps(run.folder) == [3, 4]
    for step in (3, 4):
        truncate(checkpoints.path(run.folder, step))
    code, _, err = says("resume", run.folder)
    assert code == 2 and "no whole checkpoint" in err.splitlines()[-1]
    assert checkpoints.steps(run.folder) == [3, 4]
    said = run.attempt()
    assert said.count("is damaged: no whole one is left") == 2 and "going on" not in said
    assert_same(run.result(), uninterrupted())


def test_a_checkpoint_under_the_name_of_a_later_step_is_passed_over(trial, uninterrupted):
    run = trial()
    run.attempt("train:4:SIGTERM")
    renamed = checkpoints.path(run.folder, 8)
    shutil.copy(checkpoints.path(run.folder, 3), renamed)
    said = run.attempt()
    assert f"checkpoint {renamed} is that of step 3 under another name: the one of step 4 is used" in said
    assert_same(run.result(), uninterrupted())


def test_any_flipped_bit_is_found(trial):
    run = trial()
    run.attempt("start:1:SIGTERM")
    file = checkpoints.path(run.folder, 1)
    size, chance = file.stat().st_size, random.Random(0)
    for at in [0, size - 1, *(chance.randrange(size) for _ in range(60)), *range(size - 600, size, 3)]:
        flip(file, at)
        assert not checkpoints.is_whole(file) or at >= size - len(checkpoints.COMMENT % 0), f"byte {at}"
        flip(file, at)
    assert checkpoints.is_whole(file)


def test_a_checkpoint_is_an_ordinary_file_of_pytorchs(tmp_path):
    file, stored = tmp_path / "c.ckpt", {"a": torch.arange(7.0), "step": 3, "nested": {"empty": torch.zeros(0), "one": torch.ones(())}}
    checkpoints.CheckpointFiles().save_checkpoint(stored, file)
    assert equal(torch.load(file, weights_only=True), stored)
    assert equal(torch.load(file, weights_only=True, mmap=True), stored)
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None and archive.comment.startswith(b"crc32 ")


def test_checkpoints_of_versions_without_a_checksum_are_read(tmp_path):
    file = tmp_path / "c.ckpt"
    torch.save({"a": torch.arange(1000.0)}, file)
    assert checkpoints.is_whole(file)
    flip_in_the_middle(file)
    assert not checkpoints.is_whole(file)


class Executed:
    """An object that executes a command where it is unpickled."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_nothing_in_a_checkpoint_is_executed(trial, says, tmp_path):
    run = trial()
    run.attempt("train:4:SIGTERM")
    file, executed = checkpoints.path(run.folder, 5), tmp_path / "executed"
    content = torch.load(checkpoints.path(run.folder, 4), weights_only=True)
    torch.save({**content, "loops": Executed(f"touch {executed}")}, file)
    for asked in (["resume", run.folder], run.command, ["validate", run.folder], ["export", run.folder]):
        code, _, err = says(*asked)
        assert code == 2 and f"{file} is no checkpoint of depthbench's" in err and err.count("\n") == 1
    assert not executed.exists()


def test_compiled_and_eager_runs_load_each_others_checkpoints(trial, uninterrupted, says, monkeypatch):
    monkeypatch.setattr(LanguageModel, "compile_regions", partialmethod(LanguageModel.compile_regions, backend="eager"))  # seconds
    run = trial()
    run.attempt("train:4:SIGTERM")
    run.monkeypatch.setenv("WITNESS_STOP", "train:8:SIGTERM")
    code, out, err = says("resume", run.folder, "--compile", "true")
    assert code == 143 and "going on from the checkpoint at step 4" in out, err
    stored = torch.load(checkpoints.path(run.folder, 8), weights_only=True)["state_dict"]
    assert not [name for name in stored if "_orig_mod" in name]
    run.attempt()
    got, expected = (result.tables["scalars"].query("name == 'train/loss'") for result in (run.result(), uninterrupted()))
    assert got.value.to_numpy() == pytest.approx(expected.value.to_numpy(), rel=1e-4)


def test_the_newest_two_and_the_best_are_kept(trial):
    run = trial()
    run.attempt("train:10:SIGTERM")
    stored = torch.load(checkpoints.path(run.folder, 10), weights_only=True)["callbacks"]
    (best,) = [state["best"] for name, state in stored.items() if "Checkpoints" in name]
    losses = Store(run.runs).scalars([run.folder.name], ["val/loss"])
    assert best[0] == losses.step[losses.value.idxmin()] and best[1] == pytest.approx(losses.value.min(), rel=1e-6)
    assert checkpoints.steps(run.folder) == sorted({9, 10, best[0]})


def test_the_best_is_kept_when_it_is_an_old_one(tmp_path):
    keeper = checkpoints.Checkpoints(tmp_path)
    checkpoints.folder(tmp_path).mkdir()
    for step, loss in enumerate([3.0, 1.0, 2.0, 2.5, 4.0], start=1):
        checkpoints.path(tmp_path, step).touch()
        if keeper.best is None or loss < keeper.best[1]:
            keeper.best = (step, loss)
        keeper._prune(step)
    assert checkpoints.steps(tmp_path) == [2, 4, 5]


def test_a_run_without_room_for_its_checkpoints_does_not_start(corpus, tmp_path, says, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 10**7, 10**7))
    monkeypatch.setenv("WITNESS_FILE", str(tmp_path / "seen"))
    code, _, err = says(*command(corpus, tmp_path / "runs"))
    needed = 4 * 3 * 4 * 353_756 / 1e9
    assert code == 2 and err.count("\n") == 1
    assert "0.01 GB free" in err and f"{needed:.2g} GB (4 at a time)" in err and "--runs" in err
    assert not (tmp_path / "seen").exists()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, with room for a tiny run."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("only root can mount a small file system; test_interruption.py has the disk that refuses a large file")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_disk_that_fills_up_during_a_run(corpus, small_disk, uninterrupted, says, monkeypatch):
    run = Trial(corpus, small_disk, says, monkeypatch)
    said = run.attempt("train:8:fill")  # the checkpoint of step 9 has no room
    assert said.count("depthbench:") == 1 and "no space left on the disk" in said and "Traceback" not in said
    assert checkpoints.newest(run.folder)[0] == 6
    (small_disk / "filler").unlink()
    assert "going on from the checkpoint at step 6" in run.attempt()
    assert_same(run.result(), uninterrupted())
