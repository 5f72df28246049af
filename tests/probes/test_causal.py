"""Causal score: known dependences between blocks, and the definition on whole passes."""

from __future__ import annotations

import math

import pandas as pd
import pytest
import torch

from depthbench import build_model
from depthbench.errors import UserError
from depthbench.probes.causal import causal, skips
from depthbench.probes.pruning import pruning
from depthbench.residuals.base import SingleStream, Stream
from tests.probes.crafted import (
    assert_every_value_is_finite,
    assert_same_whatever_the_batch,
    every_design_in_use,
    model_of,
    some_windows,
    states_of,
    values_of,
    with_embedding,
    with_idle_blocks,
)

ONE, TWO, THREE = torch.eye(2), torch.diag(torch.tensor([1.0, 2.0])), torch.diag(torch.tensor([3.0, 1.0]))


class Matrices(SingleStream):
    """Block l adds A_l x."""

    matrices: tuple[torch.Tensor, ...] = (TWO, THREE)

    def write(self, state, carry, branch_out, emitted, *, sublayer):
        return Stream(state.x + state.x @ self.matrices[sublayer // 2].T) if sublayer % 2 else state


def matrix_model(*matrices):
    """Token 0 is (1, 0), token 1 is (0, 1)."""
    model = build_model(Matrices, n_layer=len(matrices), d_model=2, n_head=1, vocab_size=2)
    model.residual.matrices = matrices
    return with_embedding(model, ONE)


WINDOW = torch.tensor([[0, 0, 0, 1, 0]])  # the model reads (1, 0) three times and (0, 1) once


def test_two_blocks_by_hand():
    """z_1 = (2, 0) or (0, 3), and block 1's step A_1 z_1 = (6, 0) or (0, 3). Without block 0 it is A_1 z_0 = (3, 0) or (0, 1), a change of
    length 3 or 2. C = (3 * 3 + 2) / (3 * 6 + 3) = 11/21, where a mean of ratios would be (3 * 1/2 + 2/3) / 4 = 13/24."""
    frame = causal(matrix_model(TWO, THREE), WINDOW)
    assert values_of(frame, "score") == {(0, 1): pytest.approx(11 / 21)}
    assert frame.value[frame.metric == "mean"].item() == pytest.approx(11 / 21 / 2 / math.sqrt(2))  # block 1 adds 0 to the sum
    (late,) = frame[frame.metric == "late_fraction"].to_dict("records")
    assert late["status"] == "not_defined" and pd.isna(late["value"]) and late["note"]
    assert set(frame.n_tokens) == {4} and set(frame.rule) == {"identity"}


def test_a_block_that_stands_still_has_score_0():
    near, nearer = 1e-7, 1e-9
    assert values_of(causal(matrix_model(ONE, near * ONE), WINDOW), "score") == {(0, 1): pytest.approx(0.5)}
    assert values_of(causal(matrix_model(ONE, nearer * ONE), WINDOW), "score") == {(0, 1): 0.0}


def test_summaries_by_hand():
    """Blocks add a x: each step is the product of (1 + a) before times a, so that C(s, l) = 1 - 1 / (1 + a_s), whatever l."""
    shares = (0.5, 0.4, 0.9, 0.1)  # of L = 4 blocks, 1, 2 and 3 are late
    frame = causal(matrix_model(*(share / (1 - share) * ONE for share in shares)), WINDOW)
    expected = {(s, later): pytest.approx(shares[s], rel=1e-5) for s in range(4) for later in range(s + 1, 4)}
    assert values_of(frame, "score") == expected
    summaries = {row.metric: row.value for row in frame.itertuples() if row.metric != "score"}
    assert summaries == {"mean": pytest.approx(sum(shares[:3]) / 4 / 2, rel=1e-5), "late_fraction": pytest.approx(1 / 3)}


@pytest.mark.parametrize("design", ["pre_ln", "lns", "moda"])
def test_identity_blocks_have_score_0(design):
    frame = causal(with_idle_blocks(model_of(design)), some_windows())
    assert len(frame) == 5 and (frame.value == 0).all()


def test_one_block_has_nothing_after_it():
    frame = causal(matrix_model(TWO), WINDOW)
    assert frame.status.tolist() == ["not_defined"] and frame.note.item()


@every_design_in_use
def test_every_design_by_the_definition(design):
    model, windows = model_of(design, dtype=torch.float64, n_layer=4), some_windows(windows=1)
    z, n_layer = states_of(model, windows), 4

    def length(change):
        return sum(change(token).norm() for token in range(len(z[0]))) / len(z[0])

    for rule in model.residual.skip_rules:
        scores = values_of(causal(model, windows, rule=rule), "score")
        assert len(scores) == 6
        for skipped in range(n_layer):
            with model.skipped(skipped, rule):
                without = states_of(model, windows)
            for block in range(skipped + 1, n_layer):
                change = length(lambda t: (without[block + 1][t] - without[block][t]) - (z[block + 1][t] - z[block][t]))  # noqa: B023
                step = length(lambda t: z[block + 1][t] - z[block][t])  # noqa: B023
                assert scores[skipped, block] == pytest.approx((change / step).item(), rel=1e-9)


@every_design_in_use
def test_pruning_comes_with_it(design):
    model, windows = model_of(design), some_windows(windows=5)
    rule = model.residual.skip_rules[-1]
    both = skips(model, windows, rule=rule, micro_batch=2)
    assert sorted(both) == ["causal", "pruning"]
    pd.testing.assert_frame_equal(both["pruning"], pruning(model, windows, rule=rule, micro_batch=2), check_exact=True)
    pd.testing.assert_frame_equal(both["causal"], causal(model, windows, rule=rule, micro_batch=2), check_exact=True)
    assert {*both["causal"].rule, *both["pruning"].rule} == {rule}


def test_the_rule_decides_and_is_named():
    model, windows = model_of("block_attnres"), some_windows()
    default, reference, other = (causal(model, windows, rule=rule) for rule in (None, "reference", "renormalise"))
    pd.testing.assert_frame_equal(default, reference)
    assert set(default.rule) == {"reference"} and set(other.rule) == {"renormalise"}
    assert (default.value - other.value).abs().max() > 0.01
    with pytest.raises(UserError, match="unknown skip rule 'identity'"):
        causal(model, windows, rule="identity")


@every_design_in_use
def test_batch_size_and_order_change_nothing(design):
    assert_same_whatever_the_batch(causal, model_of(design))


@every_design_in_use
def test_bf16_weights_give_numbers(design):
    frame = causal(model_of(design, dtype=torch.bfloat16), some_windows())
    assert_every_value_is_finite(frame, {"score": 3, "mean": 1, "late_fraction": 1})


def test_progress_ends_at_1():
    told = []
    causal(model_of(), some_windows(windows=3), micro_batch=2, progress=told.append)
    assert told == sorted(told) and told[0] > 0 and told[-1] == 1 and len(told) == 2 * 4


def test_the_late_fraction_is_over_the_pairs_whose_score_is_a_number():
    model = model_of(n_layer=4)
    with torch.no_grad():
        model.blocks[3].feed_forward.core.down_proj.weight.fill_(torch.nan)  # of the pairs (1, 2), (1, 3), (2, 3) the first is left
    frame = causal(model, some_windows()).set_index("metric")
    (score,) = frame[(frame.i == 1) & (frame.j == 2)].value
    late = frame.loc["late_fraction"]
    assert late.value == float(score > 0.45) and late.note == "over the 1 of 3 pairs whose score is a number"
    with torch.no_grad():
        model.embedding.weight.fill_(torch.nan)
    assert math.isnan(causal(model, some_windows()).set_index("metric").value["late_fraction"])
