"""Jacobian deviation: known blocks, the plain double loop over naive forms, the estimate, and a model that is left as it was."""

from __future__ import annotations

import math
from importlib import import_module

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from depthbench.errors import UserError
from depthbench.nn.sublayer import Sublayer
from depthbench.probes.jacobian import jacobian
from depthbench.residuals.base import SingleStream
from tests.contract.external import TwoLanes
from tests.probes import crafted
from tests.probes.crafted import every_design, model_of, some_windows, values_of

WIDTH = 16


class Core(nn.Module):
    """x -> its function of x, in the place of attention or feed-forward."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x_BTD, carry, rotation):
        return self.function(x_BTD), None


def adding(*functions) -> type[SingleStream]:
    """A design of one's own: x + f(x), f the given functions in turn."""

    class Adding(SingleStream):
        def build_sublayer(self, config, *, sublayer):
            return Sublayer(None, Core(functions[sublayer % len(functions)]))

        def write(self, state, carry, branch_out, emitted, *, sublayer):
            return state._replace(x=state.x + branch_out)

    return Adding


def zero(x_BTD: Tensor) -> Tensor:
    return 0 * x_BTD


def some_matrix(seed: int) -> Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def deviations(model, windows=None, **keywords) -> list[float]:
    found = values_of(jacobian(model, some_windows() if windows is None else windows, **keywords), "deviation")
    assert list(found) == list(range(len(model.blocks)))
    return list(found.values())


# Known blocks ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["exact", "hutchinson"])
@pytest.mark.parametrize("design", ["pre_ln", "sandwich_ln", "lns", "moda"])
def test_identity_blocks_are_exactly_0_away(design, method):
    frame = jacobian(crafted.with_idle_blocks(model_of(design)), some_windows(), method=method)
    assert set(frame.value) == {0.0}


def test_a_linear_map_per_token_is_its_own_jacobian():
    """The transposed one would be as far from the identity, but not a product of two in the wrong order."""
    A, B = some_matrix(0), some_matrix(1)
    one, both = (model_of(adding(lambda x: x @ A.mT, second), dtype=torch.float64) for second in (zero, lambda x: x @ B.mT))
    identity = torch.eye(WIDTH, dtype=torch.float64)
    assert deviations(one) == pytest.approx([A.norm().item() / 4] * 3)
    assert deviations(both) == pytest.approx([((identity + B) @ (identity + A) - identity).norm().item() / 4] * 3)


def test_outputs_are_summed_over_positions_and_inputs_averaged():
    """Position p of T reaches the T - p + 1 outputs from it on."""
    model = model_of(adding(lambda x: 0.5 * x.cumsum(1), zero), dtype=torch.float64)
    assert deviations(model, some_windows(length=7)) == pytest.approx([0.5 * (7 + 1) / 2] * 3)


def test_the_average_is_one_of_jacobians_over_all_windows():
    model, windows = model_of(adding(torch.square, zero), dtype=torch.float64, n_layer=1), some_windows()
    mean = 2 * model.embedding(windows[:, :-1]).mean((0, 1))
    assert deviations(model) == pytest.approx([mean.norm().item() / 4])


def test_a_block_that_forgets_its_input_is_1_away():
    assert deviations(model_of(adding(lambda x: 1 - x, zero))) == [1.0] * 3

    class Constant(crafted.AfterEachBlock):
        def turn(self, x_BTD):
            return torch.ones_like(x_BTD)

    assert deviations(model_of(Constant)) == [1.0] * 3


# The plain double loop ------------------------------------------------------------------------------------------------------------


def replace_newest(state, x: Tensor):
    return state._replace(sources=torch.cat((state.sources[:-1], x.unsqueeze(0))))


NAIVE = {  # the map of a block, said in terms of the naive forms' states
    "moda": (lambda state: state.x, lambda state, x: state._replace(x=x)),
    "mhc": (lambda state: state.H, lambda state, x: state._replace(H=x)),
    "hc": (lambda state: state.H, lambda state, x: state._replace(H=x)),
    "full_attnres": (lambda state: state.sources[-1], replace_newest),
    "block_attnres": (lambda state: state.sources[-1], replace_newest),
}


@pytest.mark.parametrize(
    ("design", "options"),
    [("pre_ln", {}), ("moda", {}), ("hc", {"streams": 2}), ("full_attnres", {})]
    + [("mhc", {"streams": 2}), ("block_attnres", {"group_size": 3}), ("block_attnres", {"group_size": 4})],
    ids=str,
)
def test_equals_the_plain_double_loop_over_the_naive_form(design, options):
    model = model_of(design, dtype=torch.float64, **options)
    windows = some_windows(windows=2, length=4)
    get, put = NAIVE.get(design, NAIVE["moda"])
    plain = model_of(import_module(f"tests.naive.{design}").NAIVE if design in NAIVE else design, dtype=torch.float64, **options)
    plain.load_state_dict(model.state_dict())
    expected = [plain_deviation(plain, windows, block, get, put) for block in range(3)]
    assert deviations(model, windows) == pytest.approx(expected, rel=1e-9)


def plain_deviation(model, windows: Tensor, block: int, get, put) -> float:
    def after(x: Tensor) -> Tensor:
        return get(model.run(put(before, x), block, block + 1))

    before = model.run(model.embed(windows[:, :-1]), 0, block)
    whole = torch.autograd.functional.jacobian(after, get(before).detach())
    positions = get(before).numel() // WIDTH
    J = whole.reshape(positions, WIDTH, positions, WIDTH).sum((0, 2)) / positions
    return (J - torch.eye(WIDTH)).norm().item() / math.sqrt(WIDTH)


# The estimate ---------------------------------------------------------------------------------------------------------------------


@every_design
def test_every_design_has_numbers_or_a_reason_and_the_estimate_agrees(design):
    model, windows = model_of(design), some_windows()
    frame = jacobian(model, windows)
    if frame.status.eq("not_defined").any():
        assert "implement stream and with_stream" in frame.note.item() and frame.metric.item() == "deviation"
        return
    crafted.assert_every_value_is_finite(frame, {"deviation": 3})
    assert set(frame.n_tokens) == {21}
    estimate = jacobian(model, windows, method="hutchinson")
    crafted.assert_every_value_is_finite(estimate, {"deviation": 3, "stderr": 3})
    exact, estimated, error = values_of(frame, "deviation"), values_of(estimate, "deviation"), values_of(estimate, "stderr")
    for block in range(3):
        assert 0 < error[block] < 0.1 * exact[block]
        assert abs(estimated[block] - exact[block]) < 3 * error[block]


def test_the_standard_error_is_that_of_repeated_estimates():
    """Blocks that are alike are estimated from directions of their own: their spread is the error that each of them states."""
    A = some_matrix(0)
    frame = jacobian(model_of(adding(lambda x: x @ A.mT, zero), dtype=torch.float64, n_layer=60), some_windows(1, 2), method="hutchinson")
    estimates, errors = (pd.Series(values_of(frame, metric)) for metric in ("deviation", "stderr"))
    assert estimates.std() == pytest.approx(errors.mean(), rel=0.25)
    assert abs(estimates.mean() - A.norm().item() / 4) < 3 * errors.mean() / 60**0.5 + 0.01


def test_wide_models_are_estimated_unless_asked_not_to_be():
    wide = dict(n_layer=1, d_model=514, n_head=1, n_kv_head=1)
    identity, windows = adding(zero), some_windows(1, 1)
    assert set(jacobian(model_of(identity, **wide), windows, samples=2).metric) == {"deviation", "stderr"}
    assert set(jacobian(model_of(identity, **wide), windows, method="exact").metric) == {"deviation"}
    assert set(jacobian(model_of(identity, **wide | {"d_model": 512}), windows).metric) == {"deviation"}


# Held as it was -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("design", ["pre_ln", "moda"])
def test_batches_and_their_order_do_not_matter(design):
    crafted.assert_same_whatever_the_batch(jacobian, model_of(design))


@pytest.mark.parametrize("design", ["pre_ln", "mhc", "moda", "full_attnres", "keel", "sandwich_ln"])
def test_half_precision_gives_numbers_near_the_full_ones(design):
    full, half = (deviations(model_of(design, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16))
    assert half == pytest.approx(full, rel=0.1)


@pytest.mark.parametrize("design", ["pre_ln", "hc", "moda", "full_attnres"])
def test_an_exception_leaves_the_model_and_the_random_state_as_they_were(design):
    model, windows = model_of(design).train(), some_windows()
    model(windows[:, :-1]).sum().backward()
    model.final_norm.weight.requires_grad_(False)
    before = {name: (value.clone(), value.grad, value.grad.clone(), value.requires_grad) for name, value in model.named_parameters()}
    drawn = torch.random.get_rng_state()

    def stop(done: float) -> None:
        if done > 0.5:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        jacobian(model, windows, progress=stop)
    assert model.training and torch.equal(torch.random.get_rng_state(), drawn)
    for name, parameter in model.named_parameters():
        value, gradient, its_value, learns = before[name]
        assert torch.equal(parameter, value) and parameter.requires_grad == learns
        assert parameter.grad is gradient and torch.equal(gradient, its_value)


def test_works_where_gradients_are_off():
    model, windows = model_of("hc"), some_windows()
    expected = jacobian(model, windows)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            pd.testing.assert_frame_equal(jacobian(model, windows), expected)


def test_progress_is_told_after_every_block():
    done = []
    jacobian(model_of(), some_windows(), micro_batch=2, progress=done.append)
    assert done == pytest.approx([2 / 9, 4 / 9, 6 / 9, 7 / 9, 8 / 9, 1])


def test_what_is_missing_or_wrong_is_said_in_one_line():
    with pytest.raises(UserError, match="unknown method 'exakt': did you mean 'exact'"):
        jacobian(model_of(), some_windows(), method="exakt")
    with pytest.raises(UserError, match="samples is 1"):
        jacobian(model_of(), some_windows(), samples=1)
    with pytest.raises(UserError, match="a probe takes"):
        jacobian(model_of(), some_windows()[0])
    (row,) = jacobian(model_of(TwoLanes), some_windows()).to_dict("records")
    assert row["status"] == "not_defined" and row["note"] == "TwoLanes does not say what a block maps: implement stream and with_stream"
