"""Path weights: they put together what each sublayer reads, and are what a hand computes."""

from __future__ import annotations

import pytest
import torch

from depthbench import build_model, residuals
from depthbench.contract.depth import centres, with_unit_gains, without_mean
from depthbench.probes.paths import paths, source_paths
from tests.contract.external import TwoLanes
from tests.probes.crafted import (
    NAIVE,
    SHAPE,
    assert_every_value_is_finite,
    assert_same_whatever_the_batch,
    model_of,
    some_windows,
    values_of,
)

L = SHAPE["n_layer"]
COUNT = (2 * L + 1) * (2 * L + 2) // 2  # pairs of a sublayer (or the readout) and a source that exists by then
DESIGNS = [(name, {}) for name in residuals.names()] + [("block_attnres", {"group_size": 3}), ("hc", {"dynamic": False})]


def fresh(design, **options):
    torch.manual_seed(3)
    return build_model(design, **SHAPE | options)


def weights_of(model, windows=None):
    return values_of(paths(model, some_windows() if windows is None else windows), "weight")


def walked(model, inputs):
    """What ran, by name and sublayer, and the per-token weights that the probe averages, by sublayer."""
    seen = {}
    with torch.no_grad(), model.taps(lambda name, sublayer, value: seen.__setitem__((name, sublayer), value)):
        weights = [of_sublayer.per_token() for of_sublayer in source_paths(model, inputs)]
    return seen, weights


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
@pytest.mark.parametrize(("design", "options"), DESIGNS)
def test_the_weighted_sources_are_what_each_sublayer_reads_at_every_token(design, options, dtype, tolerance):
    model, inputs = with_unit_gains(model_of(design, dtype=dtype, **options)), some_windows()[:, :-1]
    seen, weights = walked(model, inputs)
    term = without_mean if centres(model.residual) else lambda x: x
    with torch.no_grad():
        sources = [model.embedding(inputs), *(seen["branch_out", k] for k in range(2 * L))]
        inputs_read = [seen["branch_in", k] for k in range(2 * L)] + [model.residual.readout(seen["state_out", 2 * L - 1], block=L)]
    assert len(weights) == 2 * L + 1
    for k, (weight, read) in enumerate(zip(weights, inputs_read, strict=True)):
        assert weight.shape[-1] == k + 1
        parts = [weight[..., i, None] * term(source.double()) for i, source in enumerate(sources[: k + 1])]
        off = (sum(parts) - term(read.double())).abs().amax(-1)
        assert (off <= tolerance * sum(part.abs() for part in parts).amax(-1)).all(), (k, off.max())


@pytest.mark.parametrize("design", ["keel", "hc", "block_attnres", "pre_ln"])
def test_rows_are_the_means_of_the_weights_per_token(design):
    model, windows = model_of(design), some_windows(5)
    _, weights = walked(model, windows[:, :-1])
    frame = paths(model, windows, micro_batch=2)
    assert_every_value_is_finite(frame, {"weight": COUNT})
    assert (frame.n_tokens == 35).all()
    for (i, k), value in values_of(frame, "weight").items():
        assert value == pytest.approx(weights[k][..., i].mean().item(), abs=1e-6)


@pytest.mark.parametrize("design", ["pre_ln", "lns", "moda", "sandwich_ln"])
def test_a_plain_stream_carries_everything_with_weight_1(design):
    assert set(weights_of(model_of(design)).values()) == {1.0}


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 100])
def test_zero_queries_give_each_slot_the_same_share(group_size):
    """Closed groups (the embedding is one) and, inside a group, its running sum. Each source lies in one of them, with weight 1."""
    design = "full_attnres" if group_size == 1 else "block_attnres"
    slots = [1 + k // group_size + (k % group_size > 0) for k in range(2 * L + 1)]
    expected = {(i, k): 1 / slots[k] for k in range(2 * L + 1) for i in range(k + 1)}
    assert weights_of(fresh(design, **{"group_size": group_size} if group_size > 1 else {})) == pytest.approx(expected, abs=1e-6)


def test_a_group_is_read_through_one_weight():
    weights = weights_of(model_of("block_attnres", group_size=3))
    assert weights[1, 5] == weights[2, 5] == weights[3, 5] != weights[4, 5] == weights[5, 5]  # sublayer 5: embedding, f1 + f2 + f3, f4 + f5
    assert sum(weights[i, 5] for i in (0, 1, 4)) == pytest.approx(1, abs=1e-6)


def test_hyper_connections_start_as_pre_ln_whose_readout_sums_the_streams():
    weights = weights_of(fresh("hc", streams=4))
    assert all(weight == (4.0 if k == 2 * L else 1.0) for (_, k), weight in weights.items())


def test_static_hyper_connections_by_hand():
    """Two streams; the first sublayer reads stream 0 and writes (1, 3) to streams that it swaps, the second reads 0.5 of both."""
    model = fresh("hc", n_layer=1, streams=2, dynamic=False)
    attention, feed_forward = model.residual.connections
    with torch.no_grad():
        attention.static_alpha.copy_(torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, 0.0]]))  # old stream 0 to new 1, doubled; 1 to new 0
        attention.static_beta.copy_(torch.tensor([1.0, 3.0]))
        feed_forward.static_alpha.copy_(torch.tensor([[0.5, 1.0, 0.0], [0.5, 0.0, 1.0]]))
    found = weights_of(model)
    # after attention: stream 0 is x + f1, stream 1 is 2 x + 3 f1
    assert found == pytest.approx({(0, 0): 1, (0, 1): 1.5, (1, 1): 2, (0, 2): 3, (1, 2): 4, (2, 2): 2})


@pytest.mark.parametrize("design", ["deepnorm", "keel"])
def test_norms_after_the_addition_by_hand(design):
    """Two blocks: s_k is 1/rms (DeepNorm: 1/std) of alpha_k x_k + f_k. KEEL's first sublayer has no norm, its first block no alpha."""
    model, windows = with_unit_gains(model_of(design, n_layer=2, dtype=torch.float64)), some_windows()
    seen, _ = walked(model, windows[:, :-1])
    alpha = [4**0.25] * 4 if design == "deepnorm" else [1.0, 1.0, 4.0, 4.0]
    s = []
    for k in range(4):
        mixed = alpha[k] * seen["branch_in", k] + seen["branch_out", k]
        mixed = without_mean(mixed) if design == "deepnorm" else mixed
        s.append((mixed.square().mean(-1) + 1e-6).rsqrt() if design == "deepnorm" or k else torch.ones(3, 7, dtype=torch.float64))
    expected = {}
    for k in range(5):
        for i in range(k + 1):
            weight = s[i - 1] if i else torch.ones_like(s[0])
            for between in range(i, k):
                weight = weight * alpha[between] * s[between]
            expected[i, k] = weight.mean().item()
    assert weights_of(model, windows) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("gain", [1.0, 0.05])
def test_keel_at_84_layers_is_finite(gain):
    """alpha alone, 168 to the power of 166, is beyond fp64. Smaller gains make alpha s larger."""
    model = fresh("keel", n_layer=84)
    with torch.no_grad():
        for norm in model.residual.outer_norms.values():
            norm.weight.fill_(gain)
    values = paths(model, some_windows(1, 3)).value
    assert len(values) == 169 * 170 // 2
    assert values.between(1e-300, 1e300).all()


@pytest.mark.parametrize("design", ["deepnorm", "keel"])
def test_gains_that_no_weight_holds_are_said(design):
    assert paths(fresh(design), some_windows()).note.isna().all()
    assert (paths(model_of(design), some_windows()).note == "gains of the outer norms left out").all()


@pytest.mark.parametrize("naive", [design for design in NAIVE if "MoDA" not in design.__name__])
def test_naive_designs_have_the_weights_of_ours(naive):
    """They state linear forms of their own."""
    name = {"NaiveFullAttnRes": "full_attnres", "NaiveBlockAttnRes": "block_attnres", "NaiveHC": "hc", "NaiveMHC": "mhc"}[naive.__name__]
    ours, theirs = model_of(name), fresh(naive)
    theirs.load_state_dict(ours.state_dict())
    assert weights_of(theirs) == pytest.approx(weights_of(ours), abs=1e-5)


def test_a_design_without_a_linear_form_has_none():
    (row,) = paths(model_of(TwoLanes), some_windows()).to_dict("records")
    assert (row["metric"], row["status"], row["n_tokens"]) == ("weight", "not_defined", 21)
    assert row["note"] == "the design states no linear form (its linear gives None for sublayer 0)"


@pytest.mark.parametrize("design", ["deepnorm", "mhc", "block_attnres"])
def test_batches_and_their_order_change_nothing(design):
    assert_same_whatever_the_batch(paths, model_of(design))


@pytest.mark.parametrize("design", residuals.names())
def test_bf16_weights_give_finite_weights(design):
    assert_every_value_is_finite(paths(model_of(design, dtype=torch.bfloat16), some_windows()), {"weight": COUNT})


@pytest.mark.parametrize("design", ["keel", "deepnorm"])
def test_factors_of_bf16_weights_are_not_rounded_to_bf16(design):
    """The embedding's weight in the readout, from what ran: over 24 sublayers, roundings of 1/256 would move it by percents."""
    model, inputs = model_of(design, dtype=torch.bfloat16, n_layer=12), some_windows()[:, :-1]
    seen, weights = walked(model, inputs)
    expected = torch.ones(inputs.shape, dtype=torch.float64)
    for k in range(24):
        if (norm := model.residual.outer_norm(k)) is not None:
            alpha = model.residual.alpha_at(k)
            mixed = alpha * seen["state_in", k].x.double() + seen["branch_out", k].double()
            square = mixed.var(-1, correction=0) if design == "deepnorm" else mixed.square().mean(-1)
            expected *= alpha / (square + norm.eps).sqrt()
    torch.testing.assert_close(weights[-1][..., 0], expected, rtol=1e-5, atol=0)
