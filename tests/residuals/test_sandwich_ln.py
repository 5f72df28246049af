"""Sandwich-LN: the norm behind a sublayer makes the size of its output projection irrelevant."""

from __future__ import annotations

import copy

import pytest
import torch

from depthbench import build_model
from tests.oracles.compare import assert_near, gradients, randomise, some_tokens

SMALL = dict(n_layer=2, d_model=16, n_head=4, n_kv_head=2, vocab_size=13, d_ff=24, norm_eps=1e-24)


@pytest.mark.parametrize("projection", ["o_proj", "down_proj"])
@pytest.mark.parametrize("factor", [0.01, 30.0])
def test_a_factor_on_an_output_projection_changes_its_own_gradient_only(projection, factor):
    plain = randomise(build_model("sandwich_ln", **SMALL).double())
    scaled = copy.deepcopy(plain)
    names = [name for name, _ in scaled.named_parameters() if projection in name]
    with torch.no_grad():
        for name in names:
            scaled.get_parameter(name).mul_(factor)
    tokens = some_tokens(plain)
    expected, actual = plain(tokens), scaled(tokens)
    assert_near(actual, expected, 1e-12)
    theirs, mine = (gradients(logits, dict(model.named_parameters())) for logits, model in ((expected, plain), (actual, scaled)))
    assert len(names) == 2
    for name, gradient in mine.items():
        assert_near(gradient * factor if name in names else gradient, theirs[name], 1e-12, name)


def test_sublayers_that_give_nothing_leave_the_stream_as_it_is():
    model = randomise(build_model("sandwich_ln", **SMALL | {"norm_eps": 1e-6}).double())
    with torch.no_grad():
        for block in model.blocks:
            block.attention.core.o_proj.weight.zero_()
            block.feed_forward.core.down_proj.weight.zero_()
    state = model.embed(some_tokens(model))
    assert torch.equal(model.run(state).x, state.x)


def test_what_is_added_has_passed_the_output_norm():
    """OLMo 2's order, the norm alone behind the sublayer, and CogView's, one on either side, are told apart by the input norm."""
    model = randomise(build_model("sandwich_ln", **SMALL).double())
    seen = {}
    with model.taps(lambda name, sublayer, value: seen.__setitem__((name, sublayer), value)):
        model(some_tokens(model))
    for sublayer in range(4):
        norm = (model.blocks[sublayer // 2].feed_forward if sublayer % 2 else model.blocks[sublayer // 2].attention).output_norm
        unit = seen["branch_out", sublayer] / norm.weight
        assert_near(unit.square().mean(-1), torch.ones(2, 6, dtype=torch.float64), 1e-12)
        assert_near(seen["state_out", sublayer].x, seen["state_in", sublayer].x + seen["branch_out", sublayer], 1e-15)
