"""Full Attention Residuals: Pre-LN at the start, the naive form anywhere, and the facts of arXiv 2603.15031."""

from __future__ import annotations

import pytest
import torch

from depthbench import build_model
from depthbench.errors import UserError
from depthbench.shapes import solve_shape
from tests.naive.full_attnres import NaiveFullAttnRes
from tests.oracles.checks import starts_as_pre_ln
from tests.oracles.compare import assert_near, gradients, randomise, some_tokens

SMALL = dict(n_layer=3, d_model=16, n_head=4, n_kv_head=2, vocab_size=13, d_ff=24)


def model_of(design="full_attnres", **changes):
    torch.manual_seed(0)
    return randomise(build_model(design, **SMALL | changes).double(), spread=0.2)


@pytest.mark.parametrize(("batch", "length"), [(2, 5), (1, 1)])
@pytest.mark.parametrize("changes", [{}, dict(n_kv_head=4, n_layer=1), dict(n_layer=9, d_model=24, n_kv_head=1, d_ff=7)], ids=str)
def test_equals_the_naive_form_with_all_gradients(changes, batch, length):
    """Nine layers are three rounds of mixes."""
    model, naive = model_of(**changes), model_of(NaiveFullAttnRes, **changes)
    tokens = some_tokens(model, batch, length)
    actual, expected = model(tokens), naive(tokens)
    assert_near(actual, expected, 1e-12)
    mine, theirs = gradients(actual, dict(model.named_parameters())), gradients(expected, dict(naive.named_parameters()))
    for name in theirs:
        assert_near(mine[name], theirs[name], 1e-11, f"gradient of {name}")


def test_starts_as_pre_ln():
    starts_as_pre_ln("full_attnres")


def test_zero_queries_get_a_gradient_and_their_key_norms_none():
    model = build_model("full_attnres", **SMALL).double()
    model(some_tokens(model)).square().sum().backward()
    assert model.residual.queries.grad.abs().amax(1).min() > 0
    assert model.residual.key_norms.grad.abs().max() == 0


def test_parameters_are_a_query_and_a_key_norm_per_mix_and_decay_where_norms_do():
    model = build_model("full_attnres", **SMALL)
    own = dict(model.residual.named_parameters())
    assert {name: tuple(value.shape) for name, value in own.items()} == {"queries": (6, 16), "key_norms": (6, 16)}
    assert model.params_extra == 4 * 3 * 16
    for decay_vectors in (False, True):  # nor do norms; and where those do, as in the reference benchmark, all of them do
        decaying = {id(parameter) for parameter in model.parameter_groups(0.1, decay_vectors=decay_vectors)[0]["params"]}
        assert {id(parameter) in decaying for parameter in (*own.values(), model.final_norm.weight)} == {decay_vectors}


def test_flops_count_a_logit_and_a_term_per_source_of_every_mix():
    shape = solve_shape("nano")
    sources = sum(k + 1 for k in range(1, 2 * shape.n_layer + 1))
    assert build_model("full_attnres", **SMALL).residual.flops_extra(shape, 100) == 100 * sources * 2 * 2 * shape.d_model


def test_weights_are_shares_that_do_not_see_the_length_of_a_source():
    model = model_of(norm_eps=1e-24)
    state = model.run(model.embed(some_tokens(model)))
    weights = model.residual.weights(state, sublayer=6)
    assert weights.shape == (2, 6, 7) and weights.min() > 0
    assert_near(weights.sum(-1), torch.ones(2, 6), 1e-14)
    longer = state._replace(closed=(*state.closed[:2], 3 * state.closed[2], *state.closed[3:]))
    assert_near(model.residual.weights(longer, sublayer=6), weights, 1e-12)
    by_hand = sum(weights[..., i : i + 1] * source for i, source in enumerate(longer.closed))
    assert_near(model.residual.readout(longer, block=3), by_hand, 1e-12)


@torch.no_grad()
def test_huge_queries_for_the_newest_source_make_a_chain_without_residuals():
    """Keys of size sqrt(D) all point the same way, but for the one that each mix shall read."""
    design = build_model("full_attnres", **SMALL).double().residual
    sources = torch.eye(16, dtype=torch.float64)[:7, None, None]
    design.queries.copy_(100 * torch.eye(16)[1:7])
    state = design.begin(design.open(sources[0]), block=0)
    for k in range(6):
        assert_near(design.read(state, sublayer=k)[0], sources[k], 1e-12)
        state = design.write(state, None, sources[k + 1], None, sublayer=k)


@pytest.mark.parametrize("where", ["readout", "mix of the last sublayer"])
def test_every_mix_counts(where):
    model = model_of()
    tokens = some_tokens(model)
    expected = model(tokens)
    with torch.no_grad():
        model.residual.queries[-1 if where == "readout" else -2] *= -1
    assert (model(tokens) - expected).abs().max() > 1e-3


def test_swapping_moves_the_inner_mix_and_the_right_boundary_and_leaves_the_left_one():
    model = model_of()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with model.swapped(0, 2):
        assert torch.equal(model.blocks[0].attention.core.q_proj.weight, before["blocks.2.attention.core.q_proj.weight"])
        for name in ("queries", "key_norms"):
            expected = before[f"residual.{name}"][[4, 5, 2, 3, 0, 1]]  # mixes 1, 2 and 5, 6 change places; 3 and 4 stay
            assert torch.equal(getattr(model.residual, name), expected)


def test_the_reference_rule_is_the_default_adds_no_source_and_lasts_for_one_mix():
    model = model_of()
    before = model.run(model.embed(some_tokens(model)), 0, 1)
    skipped = model.residual.skip(before, block=1)
    assert skipped.closed is before.closed
    assert torch.equal(model.residual.read(skipped, sublayer=4)[0], before.closed[-1])
    assert torch.equal(model.residual.depth_state(skipped, block=2), before.closed[-1])
    assert not model.run(skipped, 2, 3).newest_only


def test_an_eps_of_the_mixes_holds_for_the_norms_that_follow_them():
    """Sublayer 0 reads the embedding, no mix."""
    model = model_of(mix_eps=0.5)
    sublayers = [function for block in model.blocks for function in (block.attention, block.feed_forward)]
    assert [function.norm.eps for function in sublayers] == [1e-6, 0.5, 0.5, 0.5, 0.5, 0.5]
    state = model.run(model.embed(some_tokens(model)))
    readout = model.residual.readout(state, block=3)
    scale = (readout.square().mean(-1, keepdim=True) + 0.5).rsqrt()
    assert_near(model.hidden(state), readout * scale * model.final_norm.weight, 1e-12)
    with pytest.raises(UserError, match="mix_eps is 1.5: give a number between 0 and 1"):
        build_model("full_attnres", **SMALL, mix_eps=1.5)
