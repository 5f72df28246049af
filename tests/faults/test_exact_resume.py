"""A run that is interrupted and goes on is the uninterrupted run to the bit: losses, samples, learning rates, weights, statistics."""

import random
from itertools import count

import pytest

from depthbench import residuals
from depthbench.corpora import BlockDataset
from depthbench.store.reader import Store
from depthbench.training import checkpoints
from depthbench.training.interruption import TimeLimit
from tests.faults.tiny_run import EVERY, SEQUENCES, STEPS, Trial, assert_same


def pass_end(corpus) -> int:
    """The step during which the first pass over the corpus ends."""
    return -(-len(BlockDataset(corpus, "train")) // SEQUENCES)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_interrupted_at_every_kind_of_place(trial, uninterrupted, corpus, accumulation):
    end = pass_end(corpus)
    assert 1 < end < STEPS
    expected = uninterrupted(accumulation)
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
        assert checkpoints.newest(run.folder)[0] == left_at, stop
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
def test_interrupted_at_random_steps(trial, uninterrupted, seed):
    accumulation = (1, 4)[seed % 2]
    run = trial(accumulation=accumulation)
    for stop in random_stops(seed, 4, accumulation):
        run.attempt(stop)
    run.attempt()
    assert_same(run.result(), uninterrupted(accumulation))


def test_with_loader_processes(trial, uninterrupted):
    run = trial(accumulation=4, workers=2)
    run.attempt("train:7:SIGTERM")
    run.attempt()
    assert_same(run.result(), uninterrupted(4))


def test_stopped_by_a_time_limit_again_and_again(trial, uninterrupted, monkeypatch):
    steps = count(1)
    monkeypatch.setattr(TimeLimit, "time_remaining", lambda *_: 1.0 if next(steps) % 5 else 0.0)
    run = trial()
    run.command += ["--trainer.max_time", "00:00:08:00"]
    for stopped_at in (5, 10):
        said = run.attempt()
        assert f"The time allowed is used up: stopped at step {stopped_at} of 12. Repeat the same command" in said
    run.attempt()
    assert_same(run.result(), uninterrupted())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_interrupted_at_more_random_steps(trial, uninterrupted, seed):
    accumulation, workers = [(1, 0), (4, 0), (1, 2), (4, 2)][seed % 4]
    run = trial(accumulation=accumulation, workers=workers)
    for stop in random_stops(100 + seed, 6, accumulation):
        run.attempt(stop)
    run.attempt()
    assert_same(run.result(), uninterrupted(accumulation))


@pytest.mark.slow
@pytest.mark.parametrize("arch", [name for name in residuals.names() if name != "pre_ln"])
def test_every_design_goes_on_exactly(corpus, tmp_path, says, monkeypatch, arch):
    results = []
    for stops in ([], ["start:5:SIGTERM", "validation.1:9:SIGINT"]):
        run = Trial(corpus, tmp_path / str(len(stops)), says, monkeypatch, accumulation=2)
        run.command += ["--arch", arch]
        for stop in [*stops, ""]:
            run.attempt(stop)
        results.append(run.result())
    assert_same(*results)
