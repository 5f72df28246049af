"""Permutation score: blocks that may change places, what moves with a block, and the definition on whole passes."""

from __future__ import annotations

from itertools import combinations

import pandas as pd
import pytest
import torch

from depthbench.probes.base import summed_loss
from depthbench.probes.permutation import permutation
from tests.oracles.compare import randomise
from tests.probes.crafted import (
    assert_every_value_is_finite,
    assert_same_whatever_the_batch,
    every_design_in_use,
    model_of,
    some_windows,
    values_of,
)


@torch.no_grad()
def with_equal_blocks(model, *blocks):
    first, *others = (model.blocks[block] for block in blocks)
    for other in others:
        other.load_state_dict(first.state_dict())
    return model


def summary(frame, metric):
    (row,) = frame[frame.metric == metric].to_dict("records")
    return row["value"]


@pytest.mark.parametrize("design", ["pre_ln", "sandwich_ln"])
def test_duplicate_blocks_change_places_unnoticed(design):
    frame = permutation(with_equal_blocks(model_of(design, n_layer=4), 1, 3), some_windows())
    scores = values_of(frame, "score")
    assert scores.pop((1, 3)) == 0
    assert len(scores) == 5 and min(scores.values()) > 1e-4


def test_all_blocks_equal_score_nothing():
    frame = permutation(with_equal_blocks(model_of(n_layer=4), 0, 1, 2, 3), some_windows())
    assert (frame[frame.metric != "loss"].value == 0).all()


def test_what_belongs_to_a_block_moves_and_what_belongs_to_a_position_stays():
    """Blocks of equal weights. LNS's scale goes with its block, so that an exchange still shows; KEEL's alpha stays where it is, and
    blocks 1 and 2, whose outer norms are equal as well, are exchanged unnoticed."""
    lns = permutation(with_equal_blocks(model_of("lns"), 0, 1, 2), some_windows())
    assert min(values_of(lns, "score").values()) > 1e-4
    keel = with_equal_blocks(model_of("keel"), 0, 1, 2)
    with torch.no_grad():
        for sublayer in (1, 2, 3, 4, 5):
            keel.residual.outer_norms[str(sublayer)].weight.fill_(1.5)
    assert set(values_of(permutation(keel, some_windows()), "score").values()) == {0.0}


@torch.no_grad()
def test_lns_exchanges_blocks_as_pre_ln_with_their_gains_would():
    lns, plain = model_of("lns"), model_of("pre_ln")
    for block, scaled in enumerate(plain.blocks):
        for sublayer in (scaled.attention, scaled.feed_forward):
            sublayer.norm.weight.mul_((block + 1) ** -0.5)
    found, expected = (permutation(model, some_windows()) for model in (lns, plain))
    assert (found.value - expected.value).abs().max() <= 1e-6


@torch.no_grad()
@every_design_in_use
def test_every_design_equals_whole_passes_to_the_bit(design):
    model, windows = model_of(design, n_layer=4), some_windows()

    def loss():
        return summed_loss(model, model.run(model.embed(windows[:, :-1])), windows[:, 1:])

    frame, whole = permutation(model, windows), loss()
    assert summary(frame, "loss") == (whole / windows[:, 1:].numel()).item()
    scores = values_of(frame, "score")
    assert list(scores) == list(combinations(range(4), 2))
    for pair, score in scores.items():
        with model.swapped(*pair):
            assert score == ((loss() - whole).abs() / whole).item() > 1e-5


def test_summaries():
    frame = permutation(randomise(model_of("hc", n_layer=5), spread=1.0), some_windows())
    scores = values_of(frame, "score")
    late = [score for (i, _), score in scores.items() if i >= 2]  # of 5 blocks, 2 is the first at L/4 or later
    assert summary(frame, "mean") == pytest.approx(sum(scores.values()) / 10)
    assert summary(frame, "late_fraction") == pytest.approx(sum(score > 0.15 for score in late) / 3)
    assert sum(score > 0.15 for score in late) == sum(score > 0.13 for score in late) == 1
    assert frame.rule.isna().all()


def test_one_block_and_two():
    one, two = (permutation(model_of(n_layer=n), some_windows()) for n in (1, 2))
    assert list(zip(one.metric, one.status, strict=True)) == [("score", "not_defined"), ("loss", "ok")]
    assert list(zip(two.metric, two.status, strict=True)) == [
        ("score", "ok"),
        ("mean", "ok"),
        ("late_fraction", "not_defined"),
        ("loss", "ok"),
    ]
    assert pd.isna(summary(two, "late_fraction"))


@every_design_in_use
def test_batch_size_and_order_change_nothing(design):
    assert_same_whatever_the_batch(permutation, model_of(design))


@every_design_in_use
def test_bf16_weights_give_numbers(design):
    frame = permutation(model_of(design, dtype=torch.bfloat16), some_windows())
    assert_every_value_is_finite(frame, {"score": 3, "mean": 1, "late_fraction": 1, "loss": 1})


def test_progress_ends_at_1():
    told = []
    permutation(model_of(n_layer=4), some_windows(windows=3), micro_batch=2, progress=told.append)
    assert told == sorted(told) and told[-1] == 1 and len(told) == 2 * 6
