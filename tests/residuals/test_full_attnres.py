"""Full Attention Residuals, written naively against the interface."""

from __future__ import annotations

import pytest
import torch

from depthbench import build_model
from tests.naive.full_attnres import CachedFullAttnRes, NaiveFullAttnRes
from tests.oracles import full_attnres
from tests.oracles.compare import assert_equals_oracle, assert_near, gradients, randomise, some_tokens

SMALL = dict(n_layer=3, d_model=16, n_head=4, n_kv_head=2, vocab_size=13, d_ff=24)


def model_of(design=NaiveFullAttnRes, **changes):
    return randomise(build_model(design, **SMALL | changes).double())


@pytest.mark.parametrize("design", [NaiveFullAttnRes, CachedFullAttnRes])
def test_equals_the_oracle_with_all_gradients(design):
    assert_equals_oracle(model_of(design, n_layer=2), full_attnres.logits, 1e-10)


def test_zero_queries_make_it_pre_ln_with_the_same_gradients():
    """At zero queries the mix is the Pre-LN stream over the number of sources, which every norm divides out, up to its eps."""
    model = model_of(norm_eps=1e-24)
    for mix in model.residual.mixes.values():
        torch.nn.init.zeros_(mix.query)
    plain = build_model("pre_ln", **SMALL, norm_eps=1e-24).double()
    plain.load_state_dict({name: weight for name, weight in model.state_dict().items() if not name.startswith("residual.")})

    tokens, shared = some_tokens(model), dict(plain.named_parameters())
    actual, expected = model(tokens), plain(tokens)
    assert_near(actual, expected, 1e-12)
    of_model = {name: parameter for name, parameter in model.named_parameters() if name in shared}
    mine, theirs = gradients(actual, of_model), gradients(expected, shared)
    for name in shared:
        assert_near(mine[name], theirs[name], 1e-12, name)


@pytest.mark.parametrize("rule", ["reference", "renormalise"])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_skipping_a_block_follows_the_rule(block, rule):
    model = model_of()
    tokens = some_tokens(model)
    state = model.residual.skip(model.run(model.embed(tokens), 0, block), block=block, rule=rule)
    actual = model.logits(model.run(state, block + 1))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert_near(actual, full_attnres.logits(weights, tokens, model.config, skip=block, rule=rule), 1e-10)


def test_the_reference_rule_is_the_default_adds_no_source_and_lasts_for_one_mix():
    model = model_of()
    before = model.run(model.embed(some_tokens(model)), 0, 1)
    skipped = model.residual.skip(before, block=1)
    assert skipped.sources is before.sources
    assert torch.equal(model.residual.read(skipped, sublayer=4)[0], before.sources[-1])
    assert not model.run(skipped, 2, 3).newest_only


def test_swapping_moves_the_inner_mix_and_the_right_boundary_and_leaves_the_left_one():
    model = model_of()
    queries = {k: mix.query.detach().clone() for k, mix in model.residual.mixes.items()}
    cores = [block.attention.core.q_proj.weight.detach().clone() for block in model.blocks]
    with model.swapped(0, 2):
        now = {k: mix.query.detach().clone() for k, mix in model.residual.mixes.items()}
        assert torch.equal(model.blocks[0].attention.core.q_proj.weight, cores[2])
        moved = {"1": "5", "2": "6", "5": "1", "6": "2", "3": "3", "4": "4"}
        assert all(torch.equal(now[k], queries[moved[k]]) for k in now)


def test_a_cache_made_from_later_weights_is_rebuilt_when_a_run_starts():
    """A state cached before a swap of later blocks must give what a fresh run gives; it would not, were the cache trusted."""
    model, naive = model_of(CachedFullAttnRes), model_of(NaiveFullAttnRes)
    naive.load_state_dict(model.state_dict())
    tokens = some_tokens(model)
    prefix = model.run(model.embed(tokens), 0, 1)
    with model.swapped(1, 2), naive.swapped(1, 2):
        expected = naive(tokens)
        assert_near(model.logits(model.run(prefix, 1)), expected, 1e-12)
        model.residual.begin = lambda state, block: state
        assert (model.logits(model.run(prefix, 1)) - expected).abs().max() > 1e-3
