"""What all probes share: the model as it was, whatever happens; windows in batches; rows as the store takes them."""

from __future__ import annotations

import inspect

import pandas as pd
import pytest
import torch

from depthbench import probes
from depthbench.errors import UserError
from depthbench.probes.base import Rows, late_from, looking_at, micro_batches, summed_loss
from depthbench.residuals.base import SingleStream, Stream
from tests.probes.crafted import model_of, some_windows

PROBES = [name for name in probes.__all__ if "micro_batch" in inspect.signature(getattr(probes, name)).parameters]


class Fails(SingleStream):
    """Draws a random number, then raises, in its second block, the first or a later time that it runs."""

    slots = "streams"  # one of them: so that every probe is defined and runs into it

    def __init__(self, config, *, time: int = 1) -> None:
        super().__init__(config)
        self.times_left = time

    def write(self, state, carry, branch_out, emitted, *, sublayer):
        if sublayer == 3:
            self.times_left -= 1
            if self.times_left == 0:
                torch.rand(())
                raise RuntimeError("in the middle of a probe")
        return Stream(state.x + branch_out)


def everything_of(model) -> dict:
    """What a probe must leave as it was."""
    return {
        "modes": [module.training for module in model.modules()],
        "parameters": {name: (value.clone(), value.requires_grad) for name, value in model.state_dict(keep_vars=True).items()},
        "taps": model._taps,
        "left out": model._left_out,
        "gradients": torch.is_grad_enabled(),
        "random state": torch.get_rng_state(),
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
    }


def assert_as_before(model, before: dict) -> None:
    after = everything_of(model)
    for name, (value, learns) in before.pop("parameters").items():
        found, still_learns = after["parameters"][name]
        assert torch.equal(found, value) and still_learns == learns, name
    assert torch.equal(after.pop("random state"), before.pop("random state"))
    assert before == {name: after[name] for name in before}


@pytest.mark.parametrize("name", PROBES)
@pytest.mark.parametrize("design", ["pre_ln", "block_attnres"])
def test_a_probe_leaves_everything_as_it_was(name, design):
    model = with_a_mode_of_its_own(model_of(design))
    before = everything_of(model)
    getattr(probes, name)(model, some_windows())
    assert_as_before(model, before)


@pytest.mark.parametrize("name", PROBES)
@pytest.mark.parametrize("time", [1, 2])
def test_a_probe_that_fails_leaves_everything_as_it_was(name, time):
    """The second time, those that intervene are in the middle of it."""
    model = with_a_mode_of_its_own(model_of(Fails, time=time))
    before = everything_of(model)
    with pytest.raises(RuntimeError, match="in the middle"):
        getattr(probes, name)(model, some_windows(), micro_batch=1)
    assert_as_before(model, before)


def with_a_mode_of_its_own(model):
    """In training, but for a block: a blanket ``train()`` would lose that."""
    model.train().blocks[1].eval()
    return model


def test_a_model_is_looked_at_in_eval_mode_and_without_gradients_unless_asked():
    model = model_of().train()
    with looking_at(model) as looked_at:
        assert looked_at is model and not model.training
        assert not model(some_windows()).requires_grad
    with looking_at(model, gradients=True):
        assert model(some_windows()).requires_grad


def test_interventions_and_taps_inside_are_undone_by_an_exception():
    model = model_of("block_attnres").train()
    before, seen = everything_of(model), []

    def fail(*tapped):
        seen.append(tapped)
        raise RuntimeError("in a tap")

    with pytest.raises(RuntimeError, match="in a tap"), looking_at(model):
        torch.rand(())
        with model.swapped(0, 2), model.skipped(1), model.taps(fail):
            model(some_windows())
    assert len(seen) == 1
    assert_as_before(model, before)


@pytest.mark.parametrize("name", PROBES)
@pytest.mark.parametrize("shape", [(8,), (2, 1), (0, 8), (1, 2, 3)])
def test_tokens_that_are_no_windows_are_refused(name, shape):
    with pytest.raises(UserError, match="tokens have shape"):
        getattr(probes, name)(model_of(), torch.zeros(shape, dtype=torch.long))


def test_windows_are_split_into_inputs_and_targets_and_progress_is_told():
    windows, told = some_windows(windows=5, length=4), []
    batches = list(micro_batches(model_of(), windows, 2, told.append))
    assert [len(inputs) for inputs, _ in batches] == [2, 2, 1]
    assert torch.equal(torch.cat([inputs for inputs, _ in batches]), windows[:, :-1])
    assert torch.equal(torch.cat([targets for _, targets in batches]), windows[:, 1:])
    assert told == [0.4, 0.8, 1.0]


def test_summed_loss_is_the_cross_entropy_of_all_tokens():
    model, windows = model_of(), some_windows()
    with torch.no_grad():
        found = summed_loss(model, model.run(model.embed(windows[:, :-1])), windows[:, 1:])
        p = model(windows[:, :-1]).double().softmax(-1)
    expected = -sum(p[b, t, windows[b, t + 1]].log() for b in range(3) for t in range(7))
    assert found.dtype == torch.float64 and found.item() == pytest.approx(expected.item(), rel=1e-6)


def test_late_begins_at_the_first_index_of_the_last_three_quarters():
    assert [late_from(n_layer) for n_layer in (1, 4, 5, 8, 9, 70)] == [1, 1, 2, 2, 3, 18]


def test_rows_have_the_columns_of_the_store():
    rows = Rows(24, rule="reference")
    rows.add("score", 0.5, 1, 2)
    rows.add("mean", torch.tensor(2.0))
    rows.not_defined("share", "a reason")
    frame = rows.frame()
    expected = pd.DataFrame(
        {
            "metric": ["score", "mean", "share"],
            "i": pd.array([1, None, None], dtype="Int64"),
            "j": pd.array([2, None, None], dtype="Int64"),
            "value": [0.5, 2.0, float("nan")],
            "n_tokens": 24,
            "rule": "reference",
            "status": ["ok", "ok", "not_defined"],
            "note": [None, None, "a reason"],
        }
    )
    pd.testing.assert_frame_equal(frame, expected)


def test_a_batch_of_no_windows_is_refused():
    with pytest.raises(UserError, match="micro_batch is 0: give a whole number of at least 1"):
        probes.norms(model_of("pre_ln"), some_windows(), micro_batch=0)
