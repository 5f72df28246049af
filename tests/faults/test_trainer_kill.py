"""kill -9 on a training run, whenever it comes: what was flushed is there once, every file opens, and the run goes on to the same end."""

import multiprocessing
import random
import signal
from contextlib import suppress

import duckdb
import pandas as pd
import pytest

from depthbench.store.folder import SEALED, SEGMENTS
from depthbench.store.reader import Store
from depthbench.training import checkpoints
from tests.faults import trainer_child
from tests.faults.tiny_run import Result, assert_same, command, folders, rows

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.faults.trainer_child"])

# A segment that is written and has no name yet, the same of a checkpoint, and of the sealed file; a segment that is merged and still
# there; a checkpoint that is no longer kept; the folder of segments that are all sealed.
PLACES = [
    *(("replace", ending) for ending in (".parquet", ".ckpt", ".duckdb")),
    *(("unlink", ending) for ending in (".parquet", ".ckpt")),
    ("rmdir", "segments"),
]
FINISHED = 0
KILLED = -signal.SIGKILL

LONGEST_S = 4.0  # such a run takes 3 s on an idle machine, half of it before the first step


class Run:
    """A tiny run in a folder of its own, attempt by attempt."""

    def __init__(self, corpus, folder, **how):
        self.runs, self.log, self.witness_file = folder / "runs", folder / "log.txt", folder / "seen.jsonl"
        self.command = command(corpus, self.runs, callback="trainer_child.Acknowledging", **how)
        folder.mkdir()

    def attempt(self, kill=None, after_s=None):
        """The exit code of one attempt, killed before a call of ``kill`` or ``after_s`` seconds, and the last step it acknowledged."""
        receiver, sender = processes.Pipe(duplex=False)
        environment = {"WITNESS_FILE": str(self.witness_file), "WITNESS_STOP": ""}
        process = processes.Process(target=trainer_child.train, args=(self.command, environment, self.log, kill, sender))
        process.start()
        sender.close()
        if after_s is not None:
            process.join(after_s)
            process.kill()
        acknowledged = None
        with suppress(EOFError):
            while True:
                acknowledged = receiver.recv()
        process.join()
        assert process.exitcode in (FINISHED, KILLED), self.log.read_text()
        return process.exitcode, acknowledged

    def result(self):
        return Result.of(self.runs, self.witness_file)

    def assert_whole(self, acknowledged, expected):
        """Every file opens, and of the steps that were acknowledged each row is there, once, as in the uninterrupted run."""
        if not self.runs.exists() or not folders(self.runs):
            return
        (folder,) = folders(self.runs)
        for segment in (folder / SEGMENTS).glob("*.parquet"):
            duckdb.execute(f"SELECT * FROM '{segment}'").fetchall()
        if (folder / SEALED).exists():
            duckdb.connect(folder / SEALED, read_only=True).close()
        assert all(checkpoints.is_whole(checkpoints.path(folder, step)) for step in checkpoints.steps(folder))
        assert Store(self.runs).runs().problem.isna().all()
        if acknowledged is None:
            return
        for name, table in rows(self.runs).items():
            done = [part[part.step <= acknowledged].reset_index(drop=True) for part in (table, expected[name])]
            pd.testing.assert_frame_equal(*done, check_exact=True)


def kill_again_and_again(corpus, folder, expected, *, kills, seed):
    """Kill runs at random until so many kills have come; each run ends as the uninterrupted one did, however often it was killed."""
    chance, left, number = random.Random(seed), kills, 0
    while left:
        number += 1
        run, code = Run(corpus, folder / f"run-{number}"), KILLED
        while code == KILLED:
            how = {}
            if left and chance.random() < 0.5:
                how = {"after_s": chance.uniform(0, LONGEST_S)}
            elif left:
                place = PLACES[(kills - left) % len(PLACES)]
                how = {"kill": (*place, chance.randint(0, 6 if place[1] == ".parquet" else 1))}
            code, acknowledged = run.attempt(**how)
            left -= code == KILLED
            run.assert_whole(acknowledged, expected.tables)
        assert Store(run.runs).runs().status.tolist() == ["finished"]
        assert_same(run.result(), expected)


def test_a_run_that_is_killed_again_and_again_comes_to_the_same_end(corpus, tmp_path, uninterrupted):
    kill_again_and_again(corpus, tmp_path, uninterrupted(), kills=5, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_twenty_kills(corpus, tmp_path, uninterrupted, seed):
    kill_again_and_again(corpus, tmp_path, uninterrupted(), kills=20, seed=seed)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_kill_at_each_kind_of_write(corpus, tmp_path, uninterrupted, place, number):
    run, expected = Run(corpus, tmp_path / "run"), uninterrupted()
    code, acknowledged = run.attempt(kill=(*place, number))
    run.assert_whole(acknowledged, expected.tables)
    assert code == KILLED or number > 0  # so many checkpoints are not removed
    assert run.attempt()[0] == FINISHED
    assert_same(run.result(), expected)
