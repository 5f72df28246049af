"""Usefulness: blocks that are affine and one that is not, the fit and its loss worked out plainly, and how windows are halved."""

from __future__ import annotations

import math
from hashlib import sha256
from importlib import import_module

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from depthbench import residuals
from depthbench.errors import UserError
from depthbench.probes.usefulness import usefulness
from tests.contract.external import TwoLanes
from tests.probes import crafted
from tests.probes.crafted import AfterEachBlock, every_design, model_of, some_windows, values_of

WIDTH = 16


class Affine(AfterEachBlock):
    """x A + 100: an intercept that counts for the penalty would be missed by a part of it."""

    def turn(self, x_BTD):
        A = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 4
        return x_BTD @ A.to(x_BTD.dtype) + 100


class Multiplies(AfterEachBlock):
    """Channel 0 becomes its product with channel 1, and channel 1 becomes 1: no affine map does that, but any the second time."""

    def turn(self, x_BTD):
        return torch.cat((x_BTD[..., :1] * x_BTD[..., 1:2], torch.ones_like(x_BTD[..., :1]), x_BTD[..., 2:]), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("design", [Affine, crafted.Flips, "pre_ln"])
def test_affine_blocks_are_not_useful(design, dtype):
    model = model_of(design, dtype=dtype)
    frame = usefulness(crafted.with_idle_blocks(model), some_windows(windows=16))
    assert list(values_of(frame, "loss_ratio").values()) == pytest.approx([1.0] * 3, abs=1e-3)
    assert frame.value[frame.metric == "useful_fraction"].item() == 0.0


def test_a_block_that_multiplies_is_useful_and_one_that_finds_it_done_is_not():
    """Tokens 0 to 3, each in its quarter of the plane, follow one another: the product's sign leaves two tokens that may come next, and
    without it there are four. log 4 / log 2 is 2."""
    model = model_of(Multiplies, n_layer=2, vocab_size=4)
    corners = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0], [-1.0, 1.0]])
    crafted.with_embedding(model, F.pad(corners, (0, WIDTH - 2)))
    with torch.no_grad():
        model.final_norm.weight.fill_(1)
        model.head.weight.zero_()[:, 0] = -5 * corners.prod(1)
    windows = (torch.arange(4)[:, None] + torch.arange(9)) % 4
    frame = usefulness(model, windows)
    assert values_of(frame, "loss_ratio") == pytest.approx({0: 2.0, 1: 1.0}, abs=1e-3)
    assert frame.value[frame.metric == "useful_fraction"].item() == 0.5


# Plainly --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("design", "field"), [("pre_ln", "x"), ("moda", "x"), ("hc", "H"), ("keel", "x")])
def test_equals_the_fit_worked_out_plainly_on_the_naive_form(design, field):
    """All states at once, an augmented least-squares problem, and a forward pass of its own for every block."""
    options = {"streams": 2} if design == "hc" else {}
    model = model_of(design, dtype=torch.float64, **options)
    plain = model_of(import_module(f"tests.naive.{design}").NAIVE if design in ("moda", "hc") else design, dtype=torch.float64, **options)
    plain.load_state_dict(model.state_dict())
    windows = some_windows(windows=11, length=12)
    by_hash = windows[sorted(range(11), key=lambda window: sha256(windows[window].numpy().tobytes()).hexdigest())]
    expected = {block: plain_ratio(plain, by_hash[:6], by_hash[6:], block, field) for block in range(3)}
    for micro_batch in (1, 4, 16):
        frame = usefulness(model, windows, micro_batch=micro_batch)
        assert values_of(frame, "loss_ratio") == pytest.approx(expected, rel=1e-7)
        assert set(frame.n_tokens) == {5 * 12}


@torch.no_grad()
def plain_ratio(model, to_fit: Tensor, to_measure: Tensor, block: int, field: str) -> float:
    before, after = (getattr(model.run(model.embed(to_fit[:, :-1]), 0, stop), field) for stop in (block, block + 1))
    x, y = (states.flatten(2).flatten(0, 1) for states in (before, after))
    penalty = torch.eye(x.shape[1], dtype=x.dtype) * (1e-3 * (x.mT @ x).diagonal().mean()).sqrt()
    stacked = torch.cat((F.pad(x, (1, 0), value=1.0), F.pad(penalty, (1, 0))))
    affine = torch.linalg.lstsq(stacked, torch.cat((y, torch.zeros_like(penalty))), driver="gelsd").solution

    state = model.run(model.embed(to_measure[:, :-1]), 0, block)
    x = getattr(state, field)
    predicted = F.pad(x.flatten(2), (1, 0), value=1.0) @ affine
    state = model.residual.skip(state, block=block)._replace(**{field: predicted.view_as(x)})
    replaced, whole = (model.logits(model.run(start, first)) for start, first in ((state, block + 1), (model.embed(to_measure[:, :-1]), 0)))
    return (loss_of(replaced, to_measure) / loss_of(whole, to_measure)).item()


def loss_of(logits: Tensor, windows: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


# Every design, every input --------------------------------------------------------------------------------------------------------


@every_design
def test_every_design_has_numbers_or_a_reason(design):
    for dtype in (torch.float32, torch.bfloat16):
        frame = usefulness(model_of(design, dtype=dtype), some_windows(windows=4, length=12))
        if frame.status.eq("not_defined").any():
            assert list(frame.metric) == ["loss_ratio", "useful_fraction"] and frame.value.isna().all()
            assert set(frame.status) == {"not_defined"} and len(set(frame.note)) == 1
        else:
            crafted.assert_every_value_is_finite(frame, {"loss_ratio": 3, "useful_fraction": 1})


def test_who_has_no_numbers_and_why():
    reasons = {design: usefulness(model_of(design), some_windows()).note[0] for design in [*residuals.names(), TwoLanes]}
    undefined = {design for design, note in reasons.items() if note and not note.startswith("fitted on")}
    assert undefined == {"full_attnres", "block_attnres", TwoLanes}
    assert "no map from one depth state to the next" in reasons["full_attnres"]
    assert reasons[TwoLanes] == "TwoLanes does not say what a block maps: implement stream and with_stream"


@pytest.mark.parametrize("design", ["pre_ln", "moda"])
def test_batches_and_their_order_do_not_matter(design):
    crafted.assert_same_whatever_the_batch(usefulness, model_of(design))


def test_a_fit_from_too_few_tokens_says_so():
    few, enough = (usefulness(model_of(n_layer=1), some_windows(windows=2, length=length)) for length in (16, 17))
    assert few.note.dropna().to_dict() == {0: "fitted on 16 tokens, fewer than the 17 weights of an output"}
    assert enough.note.isna().all()


def test_states_that_are_all_zero_are_left_zero():
    model = crafted.with_idle_blocks(crafted.with_embedding(model_of(), torch.zeros(WIDTH)))
    assert values_of(usefulness(model, some_windows()), "loss_ratio") == {0: 1.0, 1: 1.0, 2: 1.0}


def test_a_model_without_numbers_gives_none_and_does_not_stop():
    model = model_of()
    with torch.no_grad():
        model.blocks[1].attention.core.o_proj.weight.fill_(math.nan)
    frame = usefulness(model, some_windows())
    assert len(frame) == 4 and frame.value.isna().all() and set(frame.status) == {"ok"}


@pytest.mark.parametrize("windows", [some_windows(windows=1), some_windows(length=0), some_windows()[0]], ids=["one", "empty", "flat"])
def test_two_windows_are_the_least(windows):
    with pytest.raises(UserError, match="give two or more"):
        usefulness(model_of(), windows)


def test_an_exception_leaves_the_model_and_the_random_state_as_they_were():
    model = model_of("moda").train()
    before, drawn = {name: value.clone() for name, value in model.state_dict().items()}, torch.random.get_rng_state()

    def stop(done: float) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        usefulness(model, some_windows(), progress=stop)
    assert model.training and torch.is_grad_enabled() and torch.equal(torch.random.get_rng_state(), drawn)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_progress_rises_to_1():
    done = []
    usefulness(model_of(), some_windows(windows=6), micro_batch=1, progress=done.append)
    assert done == sorted(done) and done[-1] == pytest.approx(1) and len(done) >= 6
