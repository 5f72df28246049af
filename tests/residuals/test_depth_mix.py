"""The machinery of mixes over depth: gradients pulled from a tape are autograd's, whoever asks, in whatever order, and nothing leaks."""

from __future__ import annotations

import weakref

import pytest
import torch

from depthbench import build_model
from depthbench.residuals import _depth_mix
from depthbench.residuals.base import map_tensors
from tests.naive.block_attnres import NaiveBlockAttnRes
from tests.oracles.compare import assert_near, gradients, randomise, some_tokens

SMALL = dict(n_layer=6, d_model=12, n_head=2, vocab_size=13, d_ff=10)
every_size = pytest.mark.parametrize("group_size", [1, 3, 6])


def pair(group_size):
    """The design and its naive form, with the same weights."""
    torch.manual_seed(0)
    model, naive = (build_model(design, **SMALL, group_size=group_size).double() for design in ("block_attnres", NaiveBlockAttnRes))
    naive.load_state_dict(randomise(model, spread=0.2).state_dict())
    return model, naive


def tensors_of(state):
    found = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, state)
    return found


@every_size
def test_gradcheck(group_size):
    """All mixes, given all terms, at an eps that matters; the terms are inputs here, so their order hangs on the ticks alone."""
    design = build_model("block_attnres", **SMALL | dict(d_model=2, n_head=1), group_size=group_size, mix_eps=0.3).double().residual
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in [(12, 2), (12, 2), *[(1, 2, 2)] * 13]]

    def mixes(queries, key_norms, embedding, *terms):
        design.queries, design.key_norms = queries, key_norms
        state = design.begin(design.open(embedding), block=0)
        for k, term in enumerate(terms):
            state = design.write(state, None, term, None, sublayer=k)
            yield design.mix(state, sublayer=k + 1)

    del design.queries, design.key_norms  # parameters; plain tensors take their place
    assert torch.autograd.gradcheck(lambda *given: tuple(mixes(*given)), [value.requires_grad_() for value in inputs])


def gradients_on_a_start(model, tokens, block):
    """On the sources of a state at ``block`` that no graph and no buffer ties to the run it came from."""
    state = map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(), model.run(model.embed(tokens), 0, block))
    values = gradients(model.logits(model.run(state, block)), dict(enumerate(tensors_of(state)))).values()
    return torch.cat([value.view(-1, *tokens.shape, 12) for value in values])


@every_size
def test_gradients_flow_into_the_tensors_of_a_state_that_a_run_starts_from(group_size):
    model, naive = pair(group_size)
    tokens = some_tokens(model, length=3)
    for block in range(7):
        mine, theirs = (gradients_on_a_start(each, tokens, block) for each in (model, naive))
        assert_near(mine, theirs, 1e-11, f"from block {block}")


def depth_gradients(model):
    """At every boundary, from the gradients on the tensors of its state."""
    states = []
    with model.taps(lambda name, sublayer, value: states.append(value) if name == "state_out" and sublayer % 2 else None):
        logits = model(some_tokens(model))
    seen = {}
    for tensor in sum(map(tensors_of, states), []):
        tensor.register_hook(lambda gradient, tensor=tensor: seen.update({id(tensor): gradient}))
    logits.square().sum().backward()
    gradients_of = [map_tensors(lambda tensor: seen[id(tensor)], state) for state in states]
    return [model.residual.depth_gradient(gradient, block=block) for block, gradient in enumerate(gradients_of, 1)]


@every_size
def test_hooks_see_the_whole_gradient_on_the_newest_source(group_size):
    for block, (mine, theirs) in enumerate(zip(*map(depth_gradients, pair(group_size)), strict=True), 1):
        assert_near(mine, theirs, 1e-11, f"boundary {block}")


@every_size
def test_a_state_is_a_value_for_runs_that_take_turns(group_size):
    model, _ = pair(group_size)
    tokens = some_tokens(model)
    expected = model(tokens)
    once = gradients(expected, dict(model.named_parameters()))
    left = right = model.run(model.embed(tokens), 0, 2)
    for block in range(2, 6):
        left, right = model.run(left, block, block + 1), model.run(right, block, block + 1)
    left, right = model.logits(left), model.logits(right)
    assert torch.equal(left, expected) and torch.equal(right, expected)
    twice = gradients(left + right, dict(model.named_parameters()))
    for name in once:
        assert_near(twice[name], 2 * once[name], 1e-11, name)


@every_size
def test_backward_passes_do_not_see_each_others_gradients(group_size):
    """One that ends before the sources are reached leaves its gradients behind; the next must not count them."""
    model, _ = pair(group_size)
    parameters = dict(model.named_parameters())
    tokens = some_tokens(model)
    expected = gradients(model(tokens), parameters)
    logits = model(tokens)
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.autograd.grad(logits.sum(), model.blocks[4].feed_forward.core.down_proj.weight, retain_graph=True)
    for last in (False, True):
        actual = torch.autograd.grad((logits * direction).sum(), [*parameters.values()], retain_graph=not last)
        for name, value in zip(parameters, actual, strict=True):
            assert_near(value, expected[name], 1e-12, name)


@pytest.mark.parametrize("learning", ["queries", "key_norms", "blocks.3.attention", "embedding", "final_norm"])
def test_gradients_are_right_when_only_some_parameters_learn(learning):
    model, _ = pair(3)
    tokens = some_tokens(model)
    expected = gradients(model(tokens), dict(model.named_parameters()))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(learning in name)
    mine = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert mine
    for name, value in gradients(model(tokens), mine).items():
        assert_near(value, expected[name], 1e-12, name)


def test_mixes_that_are_only_looked_at_leave_no_trace():
    """As when statistics are recorded in training: a mix is made twice, and its gradient is counted once."""
    model, _ = pair(3)
    tokens, parameters = some_tokens(model), dict(model.named_parameters())
    expected = gradients(model(tokens), parameters)
    seen = []

    def look(name, sublayer, value):
        if name == "state_out" and sublayer % 2:
            seen.append(model.residual.depth_state(value, block=sublayer // 2 + 1))

    with model.taps(look):
        actual = gradients(model(tokens), parameters)
    assert len(seen) == 6
    for name in expected:
        assert torch.equal(actual[name], expected[name]), name


@pytest.mark.parametrize("group_size", [1, 3])
def test_two_readings_of_one_mix_add_up(group_size):
    found = []
    for model in pair(group_size):
        state = model.run(model.embed(some_tokens(model)))
        read = model.residual.readout(state, block=6) + 2 * model.residual.readout(state, block=6)
        parameters = {name: value for name, value in model.named_parameters() if not name.startswith(("head", "final_norm"))}
        found.append(gradients(read, parameters))
    for name in found[0]:
        assert_near(found[0][name], found[1][name], 1e-11, name)


def test_without_gradients_the_values_are_the_same():
    model, _ = pair(3)
    tokens = some_tokens(model)
    expected = model(tokens).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(model(tokens), expected)


def test_autocast_does_not_reach_the_mixes():
    model = pair(3)[0].float()
    generator = torch.Generator().manual_seed(0)
    terms = [torch.randn(1, 3, 12, generator=generator) for _ in range(13)]

    def read(autocast):
        given = [term.clone().requires_grad_() for term in terms]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            state = model.residual.begin(model.residual.open(given[0]), block=0)
            for k, term in enumerate(given[1:]):
                state = model.residual.write(state, None, term, None, sublayer=k)
                model.residual.mix(state, sublayer=k + 1).square().sum().backward(retain_graph=True)
            from_afar = model.residual.mix(state._replace(closed=(*state.closed,)), sublayer=12)  # what no run stands at
        return [from_afar, *(value.grad for value in given)]

    assert all(torch.equal(mine, plain) for mine, plain in zip(read(True), read(False), strict=True))


def test_sources_lie_in_one_buffer_and_nothing_outlives_the_graph(monkeypatch):
    tapes = []
    init = _depth_mix.Tape.__init__
    monkeypatch.setattr(_depth_mix.Tape, "__init__", lambda self, *given: tapes.append(weakref.ref(self)) or init(self, *given))
    model, _ = pair(1)
    state = model.run(model.run(model.embed(some_tokens(model)), 0, 3), 3)  # a run that goes on where another ended copies nothing
    assert len({source.untyped_storage().data_ptr() for source in state.closed}) == 1
    logits = model.logits(state)
    logits.sum().backward()
    assert [tape()._gradients for tape in tapes] == [None, None]  # given back while the graph still stands
    del state, logits
    assert [tape() for tape in tapes] == [None, None]
