"""Mixture-of-Depths Attention, written naively against the interface."""

from __future__ import annotations

import pytest
import torch

from depthbench import build_model
from depthbench.nn.rotary import rotation_for
from tests.naive.moda import NaiveMoDA
from tests.oracles import moda
from tests.oracles.compare import assert_equals_oracle, assert_near, randomise, some_tokens

SMALL = dict(n_layer=3, d_model=16, n_head=4, n_kv_head=2, vocab_size=13, d_ff=24)


def model_of(**changes):
    return randomise(build_model(NaiveMoDA, **SMALL | changes).double())


@pytest.mark.parametrize("qk_norm", [False, True])
def test_equals_the_oracle_with_all_gradients(qk_norm):
    assert_equals_oracle(model_of(qk_norm=qk_norm), moda.logits, 1e-10)


@pytest.mark.parametrize("rule", ["zeros", "dropped"])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_skipping_a_block_follows_the_rule(block, rule):
    model = model_of()
    tokens = some_tokens(model)
    state = model.residual.skip(model.run(model.embed(tokens), 0, block), block=block, rule=rule)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    expected = moda.logits(weights, tokens, model.config, skip=block, rule=rule)
    assert_near(model.logits(model.run(state, block + 1)), expected, 1e-10)


class WithoutDepth(NaiveMoDA):
    def read(self, state, *, sublayer):
        return state.x, (state.keys[:0], state.values[:0])


def test_without_its_depth_part_it_is_pre_ln():
    model = randomise(build_model(WithoutDepth, **SMALL).double())
    plain = build_model("pre_ln", **SMALL).double()
    plain.load_state_dict({name: weight for name, weight in model.state_dict().items() if "depth_" not in name})
    tokens = some_tokens(model)
    assert_near(model(tokens), plain(tokens), 1e-12)


def test_one_block_is_pre_ln_without_extra_parameters():
    model, plain = model_of(n_layer=1), build_model("pre_ln", **SMALL | {"n_layer": 1}).double()
    plain.load_state_dict(model.state_dict())
    assert_near(model(some_tokens(model)), plain(some_tokens(model)), 1e-12)


@pytest.mark.parametrize("block", [1, 2])
@torch.no_grad()
def test_zero_logits_give_depth_its_share_of_the_entries(block):
    """With zero queries, depth values of one, own values of zero and an identity at the output, the branch is the depth mass."""
    model = model_of()
    tokens = some_tokens(model, length=9)
    state = model.run(model.embed(tokens), 0, block)
    core = model.blocks[block].attention.core
    for weight in (core.q_proj.weight, core.v_proj.weight):
        weight.zero_()
    core.o_proj.weight.copy_(torch.eye(16))
    assert len(state.values) == 2 * block
    mass, _ = core(state.x, (state.keys, torch.ones_like(state.values)), rotation_for(state.x, model.config.head_dim))
    expected = torch.tensor([2 * block / (t + 1 + 2 * block) for t in range(9)], dtype=torch.float64)
    assert_near(mass, expected[None, :, None].expand_as(mass), 1e-12)


@torch.no_grad()
def test_a_depth_slot_of_one_token_reaches_that_token_only():
    model = model_of()
    state = model.run(model.embed(some_tokens(model)), 0, 1)
    values = state.values.clone()
    values[:, :, 3] += 1
    (before, _), (after, _) = (
        model.blocks[1].attention(state.x, (state.keys, v), rotation_for(state.x, model.config.head_dim)) for v in (state.values, values)
    )
    changed = (before - after).abs().amax(dim=(0, 2)) > 1e-9
    assert changed.tolist() == [False, False, False, True, False, False]


def test_swapping_with_the_last_block_leaves_its_missing_projection_in_place():
    model = model_of()
    first, last = (block.feed_forward.core for block in (model.blocks[0], model.blocks[2]))
    depth, up = first.depth_k_proj.weight.detach().clone(), last.up_proj.weight.detach().clone()
    with model.swapped(0, 2):
        assert torch.equal(first.depth_k_proj.weight, depth)
        assert torch.equal(first.up_proj.weight, up)
