"""Hyper-Connections: the same function as Pre-LN at the start, as the naive form anywhere, and the facts of arXiv 2409.19606."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from depthbench import build_model
from depthbench.errors import UserError
from depthbench.nn.rotary import rotation_for
from depthbench.residuals import _streams
from depthbench.residuals.hc import HC
from tests.naive.hc import NaiveHC
from tests.oracles.checks import starts_as_pre_ln, starts_with_scaled_matrices
from tests.oracles.compare import assert_near, gradients, randomise, some_tokens

SMALL = dict(n_layer=3, d_model=12, n_head=6, n_kv_head=2, vocab_size=13, d_ff=17)


def model_of(design="hc", **changes):
    return randomise(build_model(design, **SMALL | changes).double())


def random(*size, seed=0):
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def streams_of(model, tokens):
    """The streams at every boundary."""
    states = [model.embed(tokens)]
    for block in range(model.config.n_layer):
        states.append(model.run(states[-1], block, block + 1))
    return [state.x for state in states]


def spread(streams):
    """How far the streams lie apart."""
    return (streams - streams[..., :1, :]).abs().max().item()


def train(model, steps=3, lr=0.1):
    tokens = some_tokens(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()


# The function ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(("streams", "batch", "length"), [(4, 2, 7), (3, 3, 1), (1, 1, 5)])
def test_equals_the_naive_form_with_all_gradients(streams, dynamic, batch, length):
    options = dict(streams=streams, dynamic=dynamic)
    model, naive = model_of(**options), model_of(NaiveHC, **options)
    naive.load_state_dict(model.state_dict())
    tokens = some_tokens(model, batch, length)
    actual, expected = model(tokens), naive(tokens)
    assert_near(actual, expected, 1e-12)
    mine, theirs = (gradients(logits, dict(of.named_parameters())) for logits, of in ((actual, model), (expected, naive)))
    for name in theirs:
        assert_near(mine[name], theirs[name], 1e-12, name)


@pytest.mark.parametrize("options", [dict(streams=n, dynamic=dynamic) for n, dynamic in product((1, 2, 4, 7), (True, False))], ids=str)
def test_starts_as_pre_ln(options):
    starts_as_pre_ln("hc", **options)


def test_two_streams_can_run_attention_and_feed_forward_side_by_side():
    model = model_of(streams=2, dynamic=False, norm_eps=1e-24)
    alone = [[1.0, 1, 0], [0, 0, 1]]  # rows: old stream; columns: read, to each new stream
    together = [[1.0, 0, 0], [0, 1, 1]]
    with torch.no_grad():
        for k, connection in enumerate(model.residual.connections):
            connection.static_alpha.copy_(torch.tensor(together if k % 2 else alone))
            connection.static_beta.copy_(torch.tensor([1.0, 1] if k % 2 else [0.0, 1]))
    tokens = some_tokens(model)
    plain = build_model("pre_ln", **SMALL, norm_eps=1e-24).double()
    plain.load_state_dict(model.state_dict(), strict=False)
    x = plain.embedding(tokens)
    for block in plain.blocks:
        rotation = rotation_for(x, plain.config.head_dim)
        x = x + block.attention(x, None, rotation)[0] + block.feed_forward(x, None, rotation)[0]
    assert_near(model(tokens), plain.head(plain.final_norm(x)), 1e-12)


def test_renaming_the_streams_leaves_the_function_alone():
    model = model_of()
    tokens, order = some_tokens(model), torch.tensor([2, 0, 3, 1])
    expected = model(tokens)
    with torch.no_grad():
        for own in model.residual.connections:
            columns = torch.cat((torch.zeros(1, dtype=torch.long), 1 + order))
            own.static_alpha.copy_(own.static_alpha[order][:, columns])
            own.static_beta.copy_(own.static_beta[order])
            own.dynamic[1:-1] = own.dynamic[1:-1][order]
    assert_near(model(tokens), expected, 1e-12)


@pytest.mark.parametrize("sublayer", range(6))
def test_the_streams_are_mixed(sublayer):
    """What a widely copied implementation left out for a year. After the last sublayer too, where the sum over streams sees it."""
    model = model_of()
    tokens = some_tokens(model)
    expected = model(tokens)
    with torch.no_grad():
        model.residual.connections[sublayer].static_alpha[0, 1 + 2] += 0.1
    assert (model(tokens) - expected).abs().max() > 1e-4


def test_streams_are_identical_at_the_start_and_separate_in_training():
    model = build_model("hc", **SMALL).double()
    tokens = some_tokens(model)
    assert all(spread(streams) == 0 for streams in streams_of(model, tokens))
    train(model)
    embedded, *later = (spread(streams) for streams in streams_of(model, tokens))
    assert embedded == 0 and min(later) > 1e-6


def test_the_start_reads_one_stream_in_turn_keeps_all_apart_and_writes_to_all():
    model = build_model("hc", **SMALL)
    state = model.embed(some_tokens(model))
    for sublayer in range(6):
        read, mix, write = model.residual.linear(state, sublayer=sublayer)
        assert torch.equal(read, torch.eye(4)[sublayer % 4].expand(2, 6, 4))
        assert torch.equal(mix, torch.eye(4).expand(2, 6, 4, 4)) and torch.equal(write, torch.ones(2, 6, 4))


# Options, counts, weight decay ----------------------------------------------------------------------------------------------------


def test_norm_then_sum_makes_the_first_logits_as_many_times_larger_as_there_are_streams():
    options = SMALL | dict(norm_eps=1e-24, streams=3)
    usual, other = build_model("hc", **options).double(), build_model("hc", **options, norm_then_sum=True).double()
    other.load_state_dict(usual.state_dict())
    tokens = some_tokens(usual)
    assert_near(other(tokens), 3 * usual(tokens), 1e-12)
    randomise(usual), randomise(other)
    assert (other(tokens) - 3 * usual(tokens)).abs().max() > 1e-2
    state = other.run(other.embed(tokens))
    assert_near(other.hidden(state), sum(other.final_norm(stream) for stream in state.x.unbind(-2)), 1e-12)
    assert_near(other.residual.readout(state, block=3), state.x.sum(-2), 0)


@pytest.mark.parametrize("design", ["hc", "mhc"])
def test_scale_branch_init_divides_what_branches_start_with_by_the_root_of_the_streams(design):
    starts_with_scaled_matrices(design, {})
    models = []
    for option in (False, True):
        torch.manual_seed(0)
        models.append(build_model(design, **SMALL, streams=3, scale_branch_init=option).state_dict())
    usual, scaled = models
    for name, weight in usual.items():
        factor = 1 / math.sqrt(3) if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
        assert_near(scaled[name], factor * weight, 1e-7, name)


def test_the_published_numbers_of_parameters_come_out():
    olmo = SimpleNamespace(d_model=2048, n_layer=16)
    assert HC.params_extra(olmo, dynamic=False) == 768
    assert HC.params_extra(olmo) == 394_048


@pytest.mark.parametrize("options", [dict(streams=3), dict(streams=1), dict(dynamic=False), dict(streams=5, dynamic=False)], ids=str)
def test_the_formula_counts_parameters_whatever_the_options(options):
    model = build_model("hc", **SMALL, **options)
    assert model.params_extra == sum(parameter.numel() for parameter in model.residual.parameters())


def test_a_token_costs_48_widths_of_multiply_adds_per_sublayer():
    shape = SimpleNamespace(d_model=100, n_layer=3)
    assert HC.flops_extra(shape, 7) == 2 * 7 * 6 * 48 * 100
    assert HC.flops_extra(shape, 7, streams=2, dynamic=False) == 2 * 7 * 6 * (2 * 100 + 4 * 100 + 2 * 100)


@pytest.mark.parametrize("decay_vectors", [False, True])
def test_the_static_part_never_decays_and_the_dynamic_part_does(decay_vectors):
    model = build_model("hc", **SMALL)
    decaying, _ = model.parameter_groups(0.1, decay_vectors=decay_vectors)
    ids = {id(parameter) for parameter in decaying["params"]}
    for own in model.residual.connections:
        assert id(own.dynamic) in ids
        assert not ids & {id(own.static_alpha), id(own.static_beta)}


@pytest.mark.parametrize("design", ["hc", "mhc"])
def test_options_out_of_range_are_refused_in_one_line(design):
    with pytest.raises(UserError, match="^streams is 0: give a whole number from 1 to 64$"):
        build_model(design, **SMALL, streams=0)
    for eps in (0.0, 1.0, float("inf"), float("nan")):
        with pytest.raises(UserError, match=f"^mix_eps is {eps}: give a number between 0 and 1"):
            build_model(design, **SMALL, mix_eps=eps)


# What probes see ------------------------------------------------------------------------------------------------------------------


def test_skipping_leaves_the_streams_and_the_depth_state_is_all_of_them():
    model = model_of(streams=3)
    state = model.run(model.embed(some_tokens(model)), 0, 1)
    assert model.residual.skip(state, block=1) is state
    depth_state = model.residual.depth_state(state, block=1)
    assert all(torch.equal(depth_state[..., 12 * s : 12 * (s + 1)], state.x[:, :, s]) for s in range(3))


@pytest.mark.parametrize("design", ["hc", "mhc"])
def test_swapping_two_blocks_moves_their_connections(design):
    model = model_of(design)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    moved = {"blocks.0.": "blocks.2.", "connections.0.": "connections.4.", "connections.1.": "connections.5."}
    moved |= {to: start for start, to in moved.items()}
    with model.swapped(0, 2):
        for name, value in model.state_dict().items():
            source = next((name.replace(start, to) for start, to in moved.items() if start in name), name)
            assert torch.equal(value, before[source]), name


# Operations on streams ------------------------------------------------------------------------------------------------------------


def connected(streams, weight, mix, branch):
    """The three operations in a row, as a sublayer strings them together."""
    z, streams = _streams.project(streams, weight, 0.1)
    h, streams = _streams.read_streams(streams, z[..., 0])
    return _streams.write_streams(streams, mix, z[..., 1].sigmoid(), h.sin() * branch)


def test_gradients_of_the_operations_pass_gradcheck():
    arguments = [random(*size, seed=seed) for seed, size in enumerate([(2, 3, 3, 5), (2, 5), (2, 3, 3, 3), (2, 3, 5)])]
    assert torch.autograd.gradcheck(connected, [argument.requires_grad_() for argument in arguments])


def test_what_is_written_does_not_depend_on_how_its_terms_lie_in_memory():
    """Static coefficients are the same numbers for all tokens, and a branch may come from anywhere."""
    streams, mix, write, branch = (random(*size, seed=seed) for seed, size in enumerate([(2, 5, 3, 4), (3, 3), (3,), (2, 5, 4)]))
    expected = torch.einsum("ts,busd->butd", mix, streams) + torch.einsum("t,bud->butd", write, branch)
    for order in ((0, 1, 2), (1, 0, 2), (0, 2, 1), (2, 1, 0)):
        lying = branch.permute(order).contiguous().permute(*(order.index(axis) for axis in range(3)))
        assert_near(_streams.write_streams(streams, mix.expand(2, 5, 3, 3), write.expand(2, 5, 3), lying), expected, 1e-14)


def test_what_is_compiled_equals_what_runs_eagerly(monkeypatch):
    arguments = [random(*size, seed=seed).requires_grad_() for seed, size in enumerate([(2, 3, 4, 6), (2, 6), (2, 3, 4, 4), (2, 3, 6)])]
    eager = connected(*arguments)
    of_eager = torch.autograd.grad((eager * random(*eager.shape)).sum(), arguments)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    as_compiled = connected(*arguments)
    assert as_compiled.grad_fn.name() != eager.grad_fn.name()
    assert_near(as_compiled, eager, 1e-14)
    for mine, theirs in zip(torch.autograd.grad((as_compiled * random(*eager.shape)).sum(), arguments), of_eager, strict=True):
        assert_near(mine, theirs, 1e-13)


@pytest.mark.parametrize("design", ["hc", "mhc"])
def test_backward_keeps_the_streams_once_per_sublayer_and_no_mixture_of_them(design):
    model = build_model(design, n_layer=2, d_model=16, n_head=2, vocab_size=13, d_ff=20)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.setdefault(tensor.untyped_storage().data_ptr(), tensor), lambda x: x):
        model(some_tokens(model, 2, 8))
    sizes = [tensor.untyped_storage().nbytes() for tensor in kept.values()]
    assert sizes.count(2 * 8 * 4 * 16 * 4) == 4


@pytest.mark.parametrize("design", ["hc", "mhc"])
def test_under_autocast_streams_and_coefficients_stay_in_fp32(design):
    model = randomise(build_model(design, **SMALL), spread=0.05)
    tokens = some_tokens(model)
    state = model.embed(tokens)
    expected = model.residual.linear(state, sublayer=0)
    with torch.autocast("cpu", torch.bfloat16):
        form = model.residual.linear(state, sublayer=0)
        branch_in, _ = model.residual.read(state, sublayer=0)
        after = model.run(state, 0, 1)
        model(tokens).float().sum().backward()  # inside: backward then sees autocast too
    assert after.x.dtype == branch_in.dtype == torch.float32
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(form, expected, strict=True))
    assert torch.equal(branch_in, torch.bmm(form.read.flatten(0, 1).unsqueeze(1), state.x.flatten(0, 1)).view_as(branch_in))


@pytest.mark.parametrize("design", ["hc", "mhc"])
def test_many_gradients_at_once_are_those_one_by_one(design):
    """torch.autograd.grad(is_grads_batched=True), as Jacobians use it."""
    model = model_of(design, n_layer=1)
    state = model.embed(some_tokens(model, 1, 3))
    x = state.x.detach().requires_grad_()
    out = model.run(state._replace(x=x)).x.sum((0, 1, 2))
    rows = torch.stack([torch.autograd.grad(value, x, retain_graph=True)[0] for value in out])
    (together,) = torch.autograd.grad(out, x, torch.eye(12, dtype=torch.float64), is_grads_batched=True)
    assert_near(together, rows, 1e-12)


def test_the_inner_norm_takes_its_own_eps():
    assert model_of().residual.mix_eps == 1e-6
    model = model_of(mix_eps=0.5)
    assert model.residual.mix_eps == 0.5 and model.final_norm.eps == 1e-6
    other = model_of()
    other.load_state_dict(model.state_dict())
    assert (model(some_tokens(model)) - other(some_tokens(other))).abs().max() > 1e-4
