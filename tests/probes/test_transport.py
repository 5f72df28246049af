"""Residual transport of streams against numpy and by hand; depth weights and the dead segment by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from depthbench import build_model, residuals
from depthbench.probes.transport import composed, dead_segment, measures, transport
from depthbench.residuals.block_attnres import BlockAttnRes
from tests.contract.external import TwoLanes
from tests.naive.hc import NaiveHC
from tests.probes.crafted import SHAPE, assert_every_value_is_finite, assert_same_whatever_the_batch, model_of, some_windows, values_of

L = SHAPE["n_layer"]
PAIRS = L * (L + 1) // 2


def fresh(design, **options):
    torch.manual_seed(3)
    return build_model(design, **SHAPE | options)


def by_numpy(H):
    """(effective rank, singular values, mean |cosine| of pairs of columns) of one matrix."""
    s = np.linalg.svd(H, compute_uv=False)
    p = s**2 / (s**2).sum()
    unit = H / np.linalg.norm(H, axis=0)
    n = len(H)
    return [np.exp(-(p * np.log(p)).sum()), *s, np.mean([abs(unit[:, i] @ unit[:, j]) for i in range(n) for j in range(i)])]


def doubly_stochastic(count, tokens, n):
    """Random mixtures of permutations, (count, tokens, n, n)."""
    rng = np.random.default_rng(0)
    mixtures = [sum(w * np.eye(n)[rng.permutation(n)] for w in rng.dirichlet(np.ones(3))) for _ in range(count * tokens)]
    return torch.tensor(np.stack(mixtures)).view(count, tokens, n, n)


# Streams --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_products_and_their_measures_are_numpys(n):
    mixes = doubly_stochastic(5, 6, n)
    for b, H in enumerate(composed(mixes), 1):
        assert H.shape == (b, 6, n, n)
        for a in range(b):
            for token, found in enumerate(measures(H[a])):
                product = np.eye(n)
                for mix in mixes[a:b, token].numpy():
                    product = mix @ product
                np.testing.assert_allclose(H[a, token], product, atol=1e-14)
                np.testing.assert_allclose(found, by_numpy(product), atol=1e-7)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_known_matrices(n):
    same, uniform, none = torch.eye(n).double(), torch.full((n, n), 1 / n).double(), torch.zeros(n, n).double()
    assert measures(same).tolist() == pytest.approx([n, *[1] * n, 0])
    assert measures(uniform).tolist() == pytest.approx([1, 1, *[0] * (n - 1), float(n > 1)], abs=1e-7)
    assert measures(none).tolist() == [1, *[0] * n, 0]
    scaled = torch.diag(torch.arange(1.0, n + 1)).double()
    assert measures(scaled)[1 : n + 1].tolist() == pytest.approx(list(range(n, 0, -1)))


def test_columns_are_old_streams():
    """Both old streams end in the first new one: parallel columns. Its transpose leaves a column of zeros."""
    gathers = torch.tensor([[1.0, 1.0], [0.0, 0.0]]).double()
    assert measures(gathers)[-1] == pytest.approx(1)
    assert measures(gathers.T)[-1] == 0


def test_hyper_connections_start_with_streams_kept_apart():
    frame = transport(fresh("hc"), some_windows())
    counts = dict.fromkeys(("effective_rank", "column_cosine", *(f"singular_value_{k}" for k in (1, 2, 3, 4))), PAIRS)
    assert_every_value_is_finite(frame, counts)
    assert list(values_of(frame, "effective_rank")) == [(a, b) for b in range(1, L + 1) for a in range(b)]
    assert (frame.n_tokens == 21).all()
    for metric, value in {"effective_rank": 4, "singular_value_1": 1, "singular_value_4": 1, "column_cosine": 0}.items():
        assert list(values_of(frame, metric).values()) == pytest.approx([value] * PAIRS)


def test_a_uniform_mix_holds_for_every_pair_around_it():
    model = fresh("hc", streams=3, dynamic=False)
    with torch.no_grad():
        model.residual.connections[3].static_alpha[:, 1:] = 1 / 3  # the feed-forward of block 1
    ranks, cosines = (values_of(transport(model, some_windows()), metric) for metric in ("effective_rank", "column_cosine"))
    for (a, b), rank in ranks.items():
        around = a <= 1 < b
        assert (rank, cosines[a, b]) == pytest.approx((1, 1) if around else (3, 0), abs=1e-6)


@pytest.mark.parametrize("design", ["hc", "mhc"])
def test_the_mixes_of_a_model_compose_in_order(design):
    model, windows = model_of(design, dtype=torch.float64), some_windows(2, 3)
    states = {}
    with torch.no_grad(), model.taps(lambda name, k, value: states.setdefault(k, value)):  # state_in comes first
        model(windows[:, :-1])
        mixes = [model.residual.linear(states[k], sublayer=k).mix.flatten(0, 1).numpy() for k in range(2 * L)]
    frame = transport(model, windows)
    metrics = ["effective_rank", *(f"singular_value_{k}" for k in (1, 2, 3, 4)), "column_cosine"]
    found = {metric: values_of(frame, metric) for metric in metrics}
    for b in range(1, L + 1):
        for a in range(b):
            products = [np.linalg.multi_dot([mixes[k][token] for k in reversed(range(2 * a, 2 * b))]) for token in range(6)]
            expected = np.mean([by_numpy(product) for product in products], axis=0)
            np.testing.assert_allclose([found[metric][a, b] for metric in metrics], expected, rtol=1e-6)


@pytest.mark.parametrize("design", ["hc", "mhc"])
@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_mixings_that_are_no_numbers_are_nan_and_spoil_no_others(design, odd):
    model = model_of(design)
    with torch.no_grad():
        model.blocks[1].feed_forward.core.down_proj.weight.fill_(odd)  # so are the streams that block 2 reads
    frame = transport(model, some_windows())
    for (_, b), value in values_of(frame, "effective_rank").items():
        assert math.isnan(value) == (b == 3)
    assert measures(torch.stack([torch.eye(2), torch.full((2, 2), odd)]).double()).isnan().all(-1).tolist() == [False, True]


def test_of_one_stream_in_a_design_of_streams_there_are_no_pairs():
    frame = transport(fresh("hc", streams=1), some_windows())
    assert set(values_of(frame, "effective_rank").values()) == set(values_of(frame, "singular_value_1").values()) == {1.0}
    (row,) = frame[frame.status == "not_defined"].to_dict("records")
    assert (row["metric"], row["note"]) == ("column_cosine", "one stream: there are no pairs of columns")


# Sources --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_zero_queries_give_each_source_and_the_running_sum_the_same_share(group_size):
    frame = transport(fresh("block_attnres", group_size=group_size), some_windows())
    slots = [1 + k // group_size + (k % group_size > 0) for k in range(2 * L + 1)]
    expected = {(slot, k): 1 / slots[k] for k in range(2 * L + 1) for slot in range(slots[k])}
    assert values_of(frame, "depth_weight") == pytest.approx(expected, abs=1e-6)
    running = {k: 1 / slots[k] for k in range(2 * L) if k % group_size}
    assert values_of(frame, "running_weight") == pytest.approx(running, abs=1e-6)
    assert frame[frame.metric == "dead_segment"].value.tolist() == [0]


def test_the_running_sum_is_the_last_slot_and_shares_sum_to_1():
    frame = transport(model_of("block_attnres", group_size=4), some_windows())
    shares, running = values_of(frame, "depth_weight"), values_of(frame, "running_weight")
    assert list(running) == [1, 2, 3, 5]  # 0 and 4 begin a group; the readout adds nothing
    for k in range(2 * L + 1):
        of_sublayer = [share for (_, sublayer), share in shares.items() if sublayer == k]
        assert sum(of_sublayer) == pytest.approx(1, abs=1e-6)
        assert k not in running or running[k] == of_sublayer[-1]


class Deaf(BlockAttnRes):
    """Says that its sublayers read nothing but the embedding before ``wakes``, all sources alike from there on."""

    wakes = 4

    def weights(self, state, *, sublayer):
        shares = torch.zeros(*state.newest.shape[:2], len(state.slots))
        shares[..., : 1 if sublayer < self.wakes else None] = 1
        return shares / shares.sum(-1, keepdim=True)


@pytest.mark.parametrize(("wakes", "blocks"), [(0, 0), (1, 0), (2, 1), (4, 2), (6, 3)])
def test_the_dead_segment_ends_with_the_first_block_that_reads_the_running_sum(wakes, blocks, monkeypatch):
    monkeypatch.setattr(Deaf, "wakes", wakes)
    frame = transport(fresh(Deaf, group_size=6), some_windows())
    assert frame[frame.metric == "dead_segment"].value.tolist() == [blocks]


def test_a_block_is_judged_by_the_mean_of_its_sublayers():
    assert dead_segment({1: 0.0099, 2: 0.0, 3: 0.0201, 5: 0.0}, 3) == 1
    assert dead_segment({1: 0.01}, 1) == 0
    assert dead_segment({1: 0.0, 2: 0.0, 3: 0.019, 5: 0.0}, 3) == 3
    assert math.isnan(dead_segment({1: 0.0, 3: math.nan, 5: 0.5}, 3))
    assert dead_segment({1: 0.5, 3: math.nan, 5: math.nan}, 3) == 0


def test_full_attention_residuals_have_no_running_sum():
    frame = transport(fresh("full_attnres"), some_windows())
    expected = {(slot, k): 1 / (k + 1) for k in range(2 * L + 1) for slot in range(k + 1)}
    assert values_of(frame, "depth_weight") == pytest.approx(expected, abs=1e-6)
    undefined = frame[frame.status == "not_defined"]
    assert undefined.metric.tolist() == ["running_weight", "dead_segment"]
    assert set(undefined.note) == {"there is no running sum: every output is a source of its own"}


# All designs ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("design", "why"),
    [
        *((name, "one stream: nothing is mixed") for name in ("pre_ln", "sandwich_ln", "lns", "deepnorm", "keel", "moda")),
        (TwoLanes, "the design states no linear form (its linear gives None for sublayer 0)"),
        (NaiveHC, "its 4 slots are not said to be streams or sources"),
    ],
)
def test_where_there_is_nothing_to_say_the_reason_is_stored(design, why):
    (row,) = transport(model_of(design), some_windows()).to_dict("records")
    assert (row["metric"], row["status"], row["note"], row["n_tokens"]) == ("effective_rank", "not_defined", why, 21)


@pytest.mark.parametrize("design", ["hc", "mhc", "block_attnres"])
def test_batches_and_their_order_change_nothing(design):
    assert_same_whatever_the_batch(transport, model_of(design))


@pytest.mark.parametrize("design", residuals.names())
def test_bf16_weights_give_no_nan(design):
    frame = transport(model_of(design, dtype=torch.bfloat16), some_windows())
    values = frame[frame.status == "ok"].value
    assert torch.tensor(values.tolist()).isfinite().all()
