"""A run whose loss or gradient becomes non-finite: no step with it, status diverged, the place named, exit code 3."""

import json

import pytest
import torch

from depthbench.store.reader import Store, read_run
from depthbench.training import checkpoints
from tests.faults.tiny_run import assert_same


def weights_of(run, step):
    return torch.load(checkpoints.path(run.folder, step), weights_only=True)["state_dict"]


@pytest.mark.parametrize(
    ("stop", "what", "place"),
    [
        ("start:8:nan_weight", "the loss of step 8 is nan", "first at branch_out of block 2 (attention)"),
        ("start:8:nan_gradient", "the gradient norm of step 8 is nan", "first at the gradient of parameter"),
        ("validation.0:6:nan_weight", "the validation loss after step 6 is nan", "first at branch_out of block 2 (attention)"),
        ("train:8:nan_weight+SIGTERM", "the weights after step 8 are not finite", "first in parameter blocks.2.attention.core."),
    ],
)
def test_it_stops_before_the_step(trial, uninterrupted, says, stop, what, place):
    run = trial(accumulation=4)
    said = run.attempt(stop)
    last_good = 3 if stop.startswith("validation") else 6
    assert said.count("depthbench:") == 1 and f"{what}: {place}" in said and "Traceback" not in said
    assert f"the checkpoint at step {last_good}, before it, is kept" in said
    row = Store(run.runs).runs().iloc[0]
    assert row.status == "diverged" and what in json.loads(read_run(run.folder)["config"])["diverged"]
    assert checkpoints.newest(run.folder)[0] == last_good
    assert all(torch.isfinite(tensor).all() for tensor in weights_of(run, last_good).values())

    again = says(*run.command)
    assert again[0] == 3 and "has diverged" in again[2] and what in again[2] and again[2].count("\n") == 1

    run.monkeypatch.setenv("WITNESS_STOP", "")
    code, out, err = says("resume", run.folder)
    assert code == 0 and f"going on from the checkpoint at step {last_good}" in out, err
    assert_same(run.result(), uninterrupted(4))
    assert "diverged" not in json.loads(read_run(run.folder)["config"])


def test_the_optimizer_does_not_step(trial, monkeypatch):
    steps, step = [], torch.optim.AdamW.step

    def counted(self, closure=None):
        loss = step(self, closure)  # the closure is the whole step up to here: it raises
        steps.append(loss)
        return loss

    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    run = trial()
    run.attempt("start:8:nan_gradient")
    assert len(steps) == 7
    rows = Store(run.runs).scalars([run.folder.name], ["train/loss"])
    assert rows.step.max() == 7 and rows.value.notna().all()


def test_where_there_is_no_checkpoint_yet_nothing_is_said_of_one(trial, says):
    run = trial()
    said = run.attempt("start:2:nan_weight")
    assert "it had no checkpoint yet" in said and "depthbench resume" not in said and "--fresh" in said
    assert checkpoints.steps(run.folder) == []
    run.monkeypatch.setenv("WITNESS_STOP", "")
    code, out, _ = says(*run.command, "--fresh")
    assert code == 0 and ".aside" in out
