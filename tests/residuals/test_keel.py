"""KEEL: its first block is special, and later ones add 1 / alpha of their branches."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from depthbench import build_model
from depthbench.errors import UserError
from tests.oracles.compare import assert_near, gradients, randomise, some_tokens

SMALL = dict(n_layer=3, d_model=16, n_head=4, n_kv_head=2, vocab_size=13, d_ff=24, norm_eps=1e-24)


def states_of(model):
    """The stream before the first sublayer and after each, and what each sublayer adds."""
    streams, branches = [], []

    def keep(name, sublayer, value):
        if name == "state_in" and sublayer == 0 or name == "state_out":
            streams.append(value.x)
        if name == "branch_out":
            branches.append(value)

    with torch.no_grad(), model.taps(keep):
        model(some_tokens(model))
    return streams, branches


def unit_gains(model):
    for norm in model.residual.outer_norms.values():
        norm.reset_parameters()
    return model


def test_the_first_block_has_neither_the_first_outer_norm_nor_alpha():
    model = randomise(build_model("keel", **SMALL).double())
    x, f = states_of(model)
    gains = {int(k): norm.weight for k, norm in model.residual.outer_norms.items()}
    assert sorted(gains) == [1, 2, 3, 4, 5]
    assert_near(x[1], x[0] + f[0], 1e-15)
    assert_near(x[2], F.rms_norm(x[1] + f[1], (16,), gains[1], 1e-24), 1e-12)
    for k in (2, 3, 4, 5):
        assert_near(x[k + 1], F.rms_norm(6 * x[k] + f[k], (16,), gains[k], 1e-24), 1e-12)


def test_the_stream_has_unit_size_after_every_sublayer_but_the_first():
    x, _ = states_of(unit_gains(randomise(build_model("keel", **SMALL).double())))
    sizes = torch.stack(x).square().mean(-1)
    assert_near(sizes[2:], torch.ones_like(sizes[2:]), 1e-12)
    assert (sizes[1] - 1).abs().max() > 0.1


def test_alpha_is_a_division_of_later_output_projections():
    keel, post = (randomise(build_model("keel", **SMALL, **options).double()) for options in ({}, {"alpha": 1.0}))
    post.load_state_dict(keel.state_dict())
    outputs = [name for name, _ in post.named_parameters() if "o_proj" in name or "down_proj" in name]
    divided = [name for name in outputs if not name.startswith("blocks.0.")]
    with torch.no_grad():
        for name in divided:
            post.get_parameter(name).div_(6)
    tokens = some_tokens(keel)
    actual, expected = keel(tokens), post(tokens)
    assert_near(actual, expected, 1e-12)
    mine, theirs = (gradients(logits, dict(model.named_parameters())) for logits, model in ((actual, keel), (expected, post)))
    assert len(divided) == 4
    for name, gradient in mine.items():
        assert_near(gradient, theirs[name] / (6 if name in divided else 1), 1e-12, name)


def test_what_later_blocks_change_goes_like_one_over_alpha():
    weights, changes = randomise(build_model("keel", **SMALL).double()).state_dict(), []
    for alpha in (1e4, 1e6):
        model = build_model("keel", **SMALL, alpha=alpha).double()
        model.load_state_dict(weights)
        x, _ = states_of(unit_gains(model))
        changes.append((x[-1] - x[2]).norm().item())
    assert 1e-6 < changes[0] < 1e-2
    assert changes[0] / changes[1] == pytest.approx(100, rel=0.01)


def test_sublayers_that_give_nothing_leave_the_normed_embedding():
    model = build_model("keel", **SMALL).double()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.core.o_proj.weight.zero_()
            block.feed_forward.core.down_proj.weight.zero_()
    state = model.embed(some_tokens(model))
    assert_near(model.run(state).x, F.rms_norm(state.x, (16,), eps=1e-24), 1e-12)


def test_outer_norms_travel_with_their_block_and_the_missing_one_stays():
    model = randomise(build_model("keel", **SMALL))
    before = {k: norm.weight.clone() for k, norm in model.residual.outer_norms.items()}
    for (first, second), moved in {(0, 2): {"1": "5", "5": "1"}, (1, 2): {"2": "4", "4": "2", "3": "5", "5": "3"}}.items():
        with model.swapped(first, second):
            for k, norm in model.residual.outer_norms.items():
                assert torch.equal(norm.weight, before[moved.get(k, k)])


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.inf, math.nan])
def test_an_alpha_that_makes_no_model_is_refused(alpha):
    with pytest.raises(UserError, match="alpha is .*: give a number above 0, or null for 2L"):
        build_model("keel", **SMALL, alpha=alpha)
