"""Block Attention Residuals: Pre-LN at the start, Full with groups of one, the naive form anywhere; skips and depth states by group."""

from __future__ import annotations

import pytest
import torch

from depthbench import build_model
from depthbench.errors import UserError
from depthbench.residuals.block_attnres import BlockAttnRes
from depthbench.shapes import solve_shape
from tests.naive.block_attnres import NaiveBlockAttnRes
from tests.oracles.checks import starts_as_pre_ln
from tests.oracles.compare import assert_near, gradients, randomise, some_tokens

SMALL = dict(n_layer=4, d_model=12, n_head=2, vocab_size=13, d_ff=10)
SIZES = [1, 2, 3, 5, 8, 9]
every_size = pytest.mark.parametrize("group_size", SIZES)


def model_of(design="block_attnres", **changes):
    torch.manual_seed(0)
    return randomise(build_model(design, **SMALL | changes).double(), spread=0.2)


def states_of(model, tokens):
    """The states at all boundaries."""
    states = [model.embed(tokens)]
    for block in range(model.config.n_layer):
        states.append(model.run(states[-1], block, block + 1))
    return states


# The function ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_size", [2, 3, 5, 6, 10, 17, 18, 40])
def test_equals_the_naive_form_with_all_gradients(group_size):
    """Nine layers: rounds of several groups, of one, and groups of several rounds."""
    changes = dict(n_layer=9, group_size=group_size)
    model, naive = model_of(**changes), model_of(NaiveBlockAttnRes, **changes)
    tokens = some_tokens(model, batch=1, length=3)
    actual, expected = model(tokens), naive(tokens)
    assert_near(actual, expected, 1e-12)
    mine, theirs = gradients(actual, dict(model.named_parameters())), gradients(expected, dict(naive.named_parameters()))
    for name in theirs:
        assert_near(mine[name], theirs[name], 1e-11, f"gradient of {name}")


@pytest.mark.parametrize("group_size", [1, 2, 3, 6, 7])
def test_starts_as_pre_ln(group_size):
    starts_as_pre_ln("block_attnres", group_size=group_size)


def test_groups_of_one_are_full_attention_residuals_to_the_last_bit():
    block, full = model_of(group_size=1), model_of("full_attnres")
    tokens = some_tokens(block)
    assert torch.equal(block(tokens), full(tokens))
    mine, theirs = (gradients(model(tokens), dict(model.named_parameters())) for model in (block, full))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@every_size
def test_sources_are_the_closed_groups_and_the_running_sum(group_size):
    model = model_of(group_size=group_size)
    outputs, checked = [model.embedding(some_tokens(model))], []

    def check(name, sublayer, value):
        if name == "branch_out":
            outputs.append(value)
        elif name == "state_in":
            ends = [0, *range(group_size, sublayer + 1, group_size)]
            sums = [outputs[0], *(sum(outputs[a + 1 : b + 1]) for a, b in zip(ends, ends[1:], strict=False))]
            sums += [sum(outputs[ends[-1] + 1 :])] if ends[-1] < sublayer else []
            assert len(value.slots) == len(sums) == sublayer // group_size + 1 + (sublayer % group_size > 0)
            for slot, expected in zip(value.slots, sums, strict=True):
                assert_near(slot, expected, 1e-12, f"sources of sublayer {sublayer}")
            checked.append(sublayer)

    with model.taps(check):
        last = model.run(model.embed(some_tokens(model)))
    assert checked == [*range(8)]
    check("state_in", 8, last)


def test_the_default_makes_at_most_eight_groups_that_begin_before_attention():
    for n_layer, group_size, groups in ((1, 2, 1), (8, 2, 8), (9, 4, 5), (32, 8, 8), (70, 18, 8)):
        model = build_model("block_attnres", **SMALL | dict(n_layer=n_layer))
        assert model.residual.group_size == group_size
        assert -(-2 * n_layer // group_size) == groups
    with pytest.raises(UserError, match="group_size is 0: give a whole number of at least 1"):
        build_model("block_attnres", **SMALL, group_size=0)


def test_flops_count_a_logit_and_a_term_per_source_of_every_mix():
    shape = solve_shape("nano")
    for group_size in (1, 3, 100):
        mixes = range(1, 2 * shape.n_layer + 1)
        sources = sum(len({*range(0, k + 1, group_size), k}) for k in mixes)
        assert BlockAttnRes.flops_extra(shape, 100, group_size=group_size) == 100 * sources * 2 * 2 * shape.d_model
    assert BlockAttnRes.flops_extra(shape, 100) == BlockAttnRes.flops_extra(shape, 100, group_size=2 * -(-shape.n_layer // 8))


# Depth states and skips -----------------------------------------------------------------------------------------------------------


@every_size
def test_depth_states_and_readouts_equal_the_naive_ones_also_of_states_long_past(group_size):
    model, naive = model_of(group_size=group_size), model_of(NaiveBlockAttnRes, group_size=group_size)
    tokens = some_tokens(model)
    for block, (state, expected) in enumerate(zip(states_of(model, tokens), states_of(naive, tokens), strict=True)):
        assert_near(model.residual.depth_state(state, block=block), naive.residual.depth_state(expected, block=block), 1e-12)
        assert_near(model.residual.readout(state, block=block), naive.residual.readout(expected, block=block), 1e-12)


def test_inside_a_group_the_depth_state_is_the_running_sum():
    model = model_of(group_size=4)
    states = states_of(model, some_tokens(model))
    depth_states = [model.residual.depth_state(state, block=block) for block, state in enumerate(states)]
    assert depth_states[1] is states[1].running and depth_states[3] is states[3].running
    for block in (2, 4):
        assert states[block].running is None
        assert torch.equal(depth_states[block], model.residual.readout(states[block], block=block))


@every_size
@pytest.mark.parametrize("rule", ["reference", "renormalise"])
def test_without_a_block_it_equals_the_naive_form_and_both_agree_on_the_states(group_size, rule):
    model, naive = model_of(group_size=group_size), model_of(NaiveBlockAttnRes, group_size=group_size)
    tokens = some_tokens(model, batch=1, length=4)
    mine, theirs = states_of(model, tokens), states_of(naive, tokens)
    for block in range(4):
        state = model.residual.skip(mine[block], block=block, rule=rule)
        expected = naive.residual.skip(theirs[block], block=block, rule=rule)
        for after in range(block + 1, 5):
            where = f"at {after} without {block}"
            assert_near(torch.stack(state.slots), expected.sources, 1e-12, f"sources {where}")
            depth_states = (each.residual.depth_state(now, block=after) for each, now in ((model, state), (naive, expected)))
            assert_near(*depth_states, 1e-12, f"depth state {where}")
            if after < 4:
                state, expected = model.run(state, after, after + 1), naive.run(expected, after, after + 1)
        assert_near(model.logits(state), naive.logits(expected), 1e-12)


def test_without_the_block_that_opens_a_group_the_next_one_adds_to_the_group_before():
    """Groups of two blocks, the third block left out: by the reference rule the second group never opens."""
    model = model_of(group_size=4)
    states = states_of(model, some_tokens(model))
    skipped = model.residual.skip(states[2], block=2)
    assert skipped.running is states[2].closed[-1] and len(skipped.closed) == 1 and not skipped.newest_only
    outputs = []
    with model.taps(lambda name, sublayer, value: outputs.append(value) if name == "branch_out" else None):
        last = model.run(skipped, 3)
    assert len(last.closed) == 2
    assert_near(last.closed[-1], states[2].closed[-1] + sum(outputs), 1e-12)

    empty = model.residual.skip(states[2], block=2, rule="renormalise")
    assert empty.running is None and empty.closed is states[2].closed
    assert model.residual.depth_state(empty, block=3).abs().max() == 0
    assert_near(model.run(empty, 3).closed[-1], sum_of_outputs(model, empty, 3), 1e-12)


def sum_of_outputs(model, state, block):
    outputs = []
    with model.taps(lambda name, sublayer, value: outputs.append(value) if name == "branch_out" else None):
        model.run(state, block)
    return sum(outputs)


def test_without_the_block_that_ends_a_group_the_boundary_mix_is_the_group():
    model = model_of(group_size=4)
    states = states_of(model, some_tokens(model))
    skipped = model.residual.skip(states[1], block=1)
    assert skipped.newest_only and skipped.running is None and skipped.closed[-1] is states[1].running
    assert torch.equal(model.residual.depth_state(skipped, block=2), states[1].running)


def test_a_boundary_inside_the_skipped_block_is_not_one_by_the_reference_rule():
    """Groups of three: block 1 is the last sublayer of the first group and the first of the second."""
    model = model_of(group_size=3)
    state = states_of(model, some_tokens(model))[1]
    assert model.residual.skip(state, block=1) is state
    closed = model.residual.skip(state, block=1, rule="renormalise")
    assert closed.running is None and closed.closed[-1] is state.running
