"""Manifold-constrained Hyper-Connections: Pre-LN at the start, the naive form anywhere, and the facts of arXiv 2512.24880."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from depthbench import build_model
from depthbench.errors import UserError
from depthbench.residuals._sinkhorn import sinkhorn
from depthbench.residuals.mhc import MHC
from tests.naive import mhc as naive_mhc
from tests.naive.mhc import NaiveMHC
from tests.oracles.checks import starts_as_pre_ln
from tests.oracles.compare import assert_near, gradients, randomise, some_tokens
from tests.residuals.test_hc import SMALL, model_of, random, spread, streams_of, train

# The function ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "batch", "length"), [({}, 2, 7), (dict(streams=3, iterations=5), 3, 1), (dict(streams=2), 1, 5)])
def test_equals_the_naive_form_with_all_gradients(options, batch, length):
    model, naive = model_of("mhc", **options), model_of(NaiveMHC, **options)
    with torch.no_grad():
        for own in model.residual.connections:
            own.bias[-len(own.bias) // 2 :].mul_(0.2)  # else the start's gap of 8 leaves next to no gradient on the mixing
            own.alpha.add_(0.5)
    naive.load_state_dict(model.state_dict())
    tokens = some_tokens(model, batch, length)
    actual, expected = model(tokens), naive(tokens)
    assert_near(actual, expected, 1e-12)
    mine, theirs = (gradients(logits, dict(of.named_parameters())) for logits, of in ((actual, model), (expected, naive)))
    for name in theirs:
        assert_near(mine[name], theirs[name], 1e-12, name)
        assert theirs[name].abs().max() > 1e-6 or not name.startswith("residual."), name


@pytest.mark.parametrize("streams", [1, 2, 4, 7])
def test_starts_as_pre_ln(streams):
    starts_as_pre_ln("mhc", streams=streams)


@pytest.mark.parametrize("bias_gap", [0.5, -3.0, 200.0])
def test_starts_as_pre_ln_whatever_the_gap(bias_gap):
    starts_as_pre_ln("mhc", bias_gap=bias_gap)


def test_is_pre_ln_whatever_is_read_and_mixed_as_long_as_all_streams_are_written_alike():
    model = build_model("mhc", **SMALL, norm_eps=1e-24).double()
    plain = randomise(build_model("pre_ln", **SMALL, norm_eps=1e-24).double())
    model.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        for k, own in enumerate(model.residual.connections):
            own.bias[:4], own.bias[8:] = random(4, seed=k), 2 * random(16, seed=k)
    tokens, shared = some_tokens(model), dict(plain.named_parameters())
    actual, expected = model(tokens), plain(tokens)
    assert_near(actual, expected, 1e-12)
    mine = gradients(actual, {name: parameter for name, parameter in model.named_parameters() if name in shared})
    for name, gradient in gradients(expected, shared).items():
        assert_near(mine[name], gradient, 1e-12, name)


@pytest.mark.parametrize("sublayer", range(1, 5))
def test_the_streams_are_mixed(sublayer):
    """Not at the first sublayer, where they are still equal and shares sum to 1, nor at the last, whose mixing leaves their sum alone."""
    model = model_of("mhc", bias_gap=1.0)
    tokens = some_tokens(model)
    expected = model(tokens)
    with torch.no_grad():
        model.residual.connections[sublayer].bias[8 + 4 * 0 + 2] += 0.5  # new stream 0, old stream 2
    assert (model(tokens) - expected).abs().max() > 1e-4


def test_mixing_leads_from_the_second_index_to_the_first():
    model = model_of("mhc", bias_gap=0.1)
    with torch.no_grad():
        model.residual.connections[0].bias[8:].view(4, 4)[1] = torch.tensor([0.0, 0, 0, 50])
    state = model.embed(some_tokens(model))._replace(x=random(2, 6, 4, 12))
    form = model.residual.linear(state, sublayer=0)
    assert form.mix[..., 1, 3].min() > 0.9
    after = model.residual.write(state, model.residual.read(state, sublayer=0)[1], torch.zeros(2, 6, 12).double(), None, sublayer=0)
    assert_near(after.x[:, :, 1], torch.einsum("bts,btsd->btd", form.mix[:, :, 1], state.x), 1e-12)


def test_streams_are_identical_at_the_start_and_separate_in_training():
    model = build_model("mhc", **SMALL).double()
    tokens = some_tokens(model)
    assert max(spread(streams) for streams in streams_of(model, tokens)) < 1e-15  # rows of the mixing sum to 1 up to rounding
    train(model)
    embedded, *later = (spread(streams) for streams in streams_of(model, tokens))
    assert embedded == 0 and min(later) > 1e-9


@pytest.mark.parametrize("gap", [0.5, 2.0])
def test_streams_that_are_read_alike_never_separate(gap):
    """The symmetric saddle: phi 0 and one b_pre for all, whatever b_res is. This is why the start is not uniform. With two streams the
    halves that a symmetric mixing gives them are exact, so that the difference is 0 and not only small."""
    model = build_model("mhc", **SMALL, streams=2, bias_gap=gap).double()
    with torch.no_grad():
        for own in model.residual.connections:
            own.bias[:2] = -1.0
    train(model)
    tokens = some_tokens(model)
    assert all(own.bias[:2].ne(-1).any() for own in model.residual.connections)  # training did move what is read
    assert [spread(streams) for streams in streams_of(model, tokens)] == [0] * 4


# Sinkhorn -------------------------------------------------------------------------------------------------------------------------


def logits_of(spread, tokens=2000, streams=4):
    return spread * random(tokens, streams, streams)


@pytest.mark.parametrize(("spread", "largest"), [(0.1, 1e-14), (1.0, 1e-2), (3.0, 0.15), (10.0, 1.0)])
def test_rows_sum_to_one_and_columns_as_far_as_the_logits_spread_allows(spread, largest):
    mixing = sinkhorn(logits_of(spread), 20)
    assert mixing.min() >= 0
    assert (mixing.sum(-1) - 1).abs().max() < 1e-14
    assert (mixing.sum(-2) - 1).abs().max() < largest
    assert (sinkhorn(logits_of(spread).float(), 20).sum(-1) - 1).abs().max() < 1e-6


def test_columns_come_first_and_rows_last():
    once = sinkhorn(logits_of(3.0), 1)
    assert_near(once.sum(-1), torch.ones(2000, 4), 1e-14)
    assert (once.sum(-2) - 1).abs().max() > 0.5


@pytest.mark.parametrize(("spread", "streams", "iterations"), [(0.1, 4, 20), (3.0, 4, 20), (8.0, 3, 7), (1.0, 1, 20), (1.0, 2, 1)])
def test_scaling_vectors_give_what_normalising_in_turn_gives_with_its_gradient(spread, streams, iterations):
    logits = logits_of(spread, 50, streams).requires_grad_()
    actual, expected = sinkhorn(logits, iterations), naive_mhc.sinkhorn(logits, iterations)
    assert_near(actual, expected, 1e-13)
    direction = random(50, streams, streams, seed=1)
    mine, theirs = (torch.autograd.grad((mixing * direction).sum(), logits)[0] for mixing in (actual, expected))
    assert_near(mine, theirs, 1e-13)


def test_sinkhorn_passes_gradcheck_for_any_leading_shape():
    logits = random(2, 1, 3, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda logits: sinkhorn(logits, 4), logits)


def test_sinkhorn_keeps_nothing_but_the_logits():
    logits = torch.randn(5, 7, 4, 4, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        sinkhorn(logits, 20)
    assert [tensor.data_ptr() for tensor in kept] == [logits.data_ptr()]


def in_logarithms(logits, iterations):
    for _ in range(iterations):
        logits = logits - logits.logsumexp(-2, keepdim=True)
        logits = logits - logits.logsumexp(-1, keepdim=True)
    return logits.exp()


def test_sinkhorn_in_fp32_stays_near_fp64_and_takes_logits_of_any_size():
    direction = random(4, 4)
    for apart, level in ((3.0, 0.0), (3.0, 1e3), (3.0, -1e3), (30.0, 0.0), (100.0, 0.0), (1e4, 0.0)):  # beyond what exp of a logit can be
        logits = (logits_of(apart) + level).float().requires_grad_()
        exact = logits.detach().double().requires_grad_()
        mixing, expected = sinkhorn(logits, 20), in_logarithms(exact, 20)
        assert_near(mixing, expected, 1e-4)
        (gradient,) = torch.autograd.grad((mixing * direction.float()).sum(), logits)
        assert_near(gradient, torch.autograd.grad((expected * direction).sum(), exact)[0], 1e-4)


def test_a_single_stream_mixes_with_weight_one():
    model = model_of("mhc", streams=1)
    form = model.residual.linear(model.embed(some_tokens(model)), sublayer=3)
    assert torch.equal(form.mix, torch.ones(2, 6, 1, 1))


# Counts, start, weight decay ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [1, 3, 5])
def test_the_formula_counts_parameters(streams):
    model = build_model("mhc", **SMALL, streams=streams)
    assert model.params_extra == sum(parameter.numel() for parameter in model.residual.parameters())


def test_counts_at_width_1024_and_24_blocks():
    shape = SimpleNamespace(d_model=1024, n_layer=24)
    assert MHC.params_extra(shape) == 48 * (24 * 4097 + 3) == 4_719_888
    assert MHC.flops_extra(shape, 7) == 2 * 7 * 48 * 120 * 1024


def test_the_start_reads_one_stream_in_turn_and_hardly_mixes():
    model = build_model("mhc", **SMALL)
    state = model.embed(some_tokens(model))
    for sublayer in range(6):
        read, mix, write = model.residual.linear(state, sublayer=sublayer)
        assert read.argmax(-1).unique().tolist() == [sublayer % 4]
        assert_near(read.amax(-1), torch.full((2, 6), 0.99966), 1e-5)
        assert_near(mix.diagonal(dim1=-2, dim2=-1), torch.full((2, 6, 4), 0.9990), 1e-4)
        assert torch.equal(write, torch.ones(2, 6, 4))


@pytest.mark.parametrize("decay_vectors", [False, True])
def test_bias_and_scales_never_decay_and_phi_does(decay_vectors):
    model = build_model("mhc", **SMALL)
    decaying, _ = model.parameter_groups(0.1, decay_vectors=decay_vectors)
    ids = {id(parameter) for parameter in decaying["params"]}
    for own in model.residual.connections:
        assert id(own.phi) in ids
        assert not ids & {id(own.bias), id(own.alpha)}


@pytest.mark.parametrize("gap", [0.0, float("inf"), float("nan")])
def test_a_gap_that_starts_all_streams_alike_or_nowhere_is_refused_in_one_line(gap):
    with pytest.raises(UserError, match=f"^bias_gap is {gap}: give a number other than 0, at which the streams would stay"):
        build_model("mhc", **SMALL, bias_gap=gap)


def test_no_iterations_are_refused_in_one_line():
    with pytest.raises(UserError, match="^iterations is 0: give a whole number of at least 1$"):
        build_model("mhc", **SMALL, iterations=0)


def test_norm_then_sum_makes_the_first_logits_as_many_times_larger_as_there_are_streams():
    usual, other = (build_model("mhc", **SMALL, norm_eps=1e-24, norm_then_sum=option).double() for option in (False, True))
    other.load_state_dict(usual.state_dict())
    tokens = some_tokens(usual)
    assert_near(other(tokens), 4 * usual(tokens), 1e-12)
