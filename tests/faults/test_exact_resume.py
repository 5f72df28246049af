"""A run that is interrupted and goes on is the uninterrupted run to the bit: losses, samples, learning rates, weights, statistics."""

import random

import pytest

from depthbench.corpora import BlockDataset
from depthbench.store.reader import Store
from depthbench.training import checkpoints
from tests.conftest import text_corpus
from tests.faults.tiny_run import EVERY, SEQUENCES, STEPS, Result, assert_same, command, folders
from tests.faults.witness import Crash

EXIT_CODE = {"SIGTERM": 143, "SIGINT": 130}


class Trial:
    """One run in a folder of its own, attempt by attempt."""

    def __init__(self, corpus, folder, says, monkeypatch, **how):
        self.says, self.monkeypatch = says, monkeypatch
        self.runs, self.file = folder / "runs", folder / "seen.jsonl"
        self.command = command(corpus, self.runs, **how)
        monkeypatch.setenv("WITNESS_FILE", str(self.file))

    def attempt(self, stop: str = "") -> str:
        """Run the command until ``stop`` (see Witness), or to its end. Returns what it said."""
        self.monkeypatch.setenv("WITNESS_STOP", stop)
        if stop.endswith("crash"):
            with pytest.raises(Crash):
                self.says(*self.command)
            return ""
        code, out, err = self.says(*self.command)
        assert code == EXIT_CODE.get(stop.rpartition(":")[2], 0), out + err
        return out

    def result(self) -> Result:
        return Result.of(self.runs, self.file)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """So small that a run passes its end."""
    return text_corpus(tmp_path_factory, texts=6)


@pytest.fixture(scope="module")
def uninterrupted(corpus, tmp_path_factory):
    """accumulation -> the Result of a run that nothing interrupts; each is trained once."""
    known = {}

    def of(accumulation, says, monkeypatch):
        if accumulation not in known:
            trial = Trial(corpus, tmp_path_factory.mktemp("whole"), says, monkeypatch, accumulation=accumulation)
            trial.attempt()
            known[accumulation] = trial.result()
        return known[accumulation]

    return of


def pass_end(corpus) -> int:
    """The step during which the first pass over the corpus ends."""
    return -(-len(BlockDataset(corpus, "train")) // SEQUENCES)


@pytest.fixture
def trial(corpus, tmp_path, says, monkeypatch):
    return lambda **how: Trial(corpus, tmp_path, says, monkeypatch, **how)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_interrupted_at_every_kind_of_place(trial, uninterrupted, corpus, says, monkeypatch, accumulation):
    end = pass_end(corpus)
    assert 1 < end < STEPS
    expected = uninterrupted(accumulation, says, monkeypatch)
    run = trial(accumulation=accumulation)
    stops = [
        ("start:1:SIGTERM", 1),  # before there is any checkpoint: the step is finished
        ("train:2:SIGINT", 2),
        ("train:3:SIGTERM", 3),  # the step of a validation and of its checkpoint, which are then still due
        ("start:5:crash", 3),  # goes on from step 3: what was recorded of step 4 stands once
        ("validation.1:6:SIGTERM", 6),  # in the middle of a validation
        ("validation.0:6:SIGINT", 6),  # and again, in the repeated one
        ("validated:6:SIGTERM", 6),  # between a validation and its checkpoint
        (f"start:{end}:SIGTERM", end),  # a pass over the corpus ends in this step
        ("validation.1:12:SIGTERM", 12),  # the last one
        ("validated:12:crash", 12),
    ]
    for stop, left_at in sorted(stops, key=lambda stop: int(stop[0].split(":")[1])):
        run.attempt(stop)
        (folder,) = folders(run.runs)
        assert checkpoints.newest(folder)[0] == left_at, stop
    said = run.attempt()
    assert "going on from the checkpoint at step 12" in said and "validation loss" in said
    assert Store(run.runs).runs()[["status", "n_attempts"]].values.tolist() == [["finished", len(stops) + 1]]
    assert_same(run.result(), expected)


def random_stops(seed: int, count: int, accumulation: int) -> list[str]:
    """Places that come one after the other, so that each is reached."""
    rng = random.Random(seed)
    steps = sorted(rng.sample(range(1, STEPS + 1), count))
    places = ["start", "train", *["validation.0", "validation.1", "validated"] * 2]
    return [
        f"{rng.choice(places if step % EVERY == 0 else places[:2])}:{step}:{rng.choice(['SIGTERM', 'SIGINT'])}" for step in steps
    ]


@pytest.mark.parametrize("seed", [0, 1])
def test_interrupted_at_random_steps(trial, uninterrupted, says, monkeypatch, seed):
    accumulation = (1, 4)[seed % 2]
    run = trial(accumulation=accumulation)
    for stop in random_stops(seed, 4, accumulation):
        run.attempt(stop)
    run.attempt()
    assert_same(run.result(), uninterrupted(accumulation, says, monkeypatch))


def test_with_loader_processes(trial, uninterrupted, says, monkeypatch):
    run = trial(accumulation=4, workers=2)
    run.attempt("train:7:SIGTERM")
    run.attempt()
    assert_same(run.result(), uninterrupted(4, says, monkeypatch))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_interrupted_at_more_random_steps(trial, uninterrupted, says, monkeypatch, seed):
    accumulation, workers = [(1, 0), (4, 0), (1, 2), (4, 2)][seed % 4]
    run = trial(accumulation=accumulation, workers=workers)
    for stop in random_stops(100 + seed, 6, accumulation):
        run.attempt(stop)
    run.attempt()
    assert_same(run.result(), uninterrupted(accumulation, says, monkeypatch))
