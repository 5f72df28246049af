"""Residual norm and cosine drift: known lengths and turns, and the loop over tokens they stand for."""

from __future__ import annotations

import pytest
import torch

from depthbench.probes.norms import norms
from tests.probes import crafted
from tests.probes.crafted import Doubles, Flips, Shifts, Vanishes, every_design, every_design_in_use, model_of, some_windows, values_of

ROWS = {"residual_norm": 4, "cosine_next": 3, "cosine_first": 4}


def test_doubling_blocks_double_the_norm_and_turn_nothing():
    model = crafted.with_embedding(model_of(Doubles), torch.ones(16))
    frame = norms(model, some_windows())
    assert values_of(frame, "residual_norm") == pytest.approx({0: 1, 1: 2, 2: 4, 3: 8}, rel=1e-14)
    assert values_of(frame, "cosine_next") == pytest.approx({0: 1, 1: 1, 2: 1}, abs=1e-14)
    assert frame[frame.metric.str.startswith("cosine")].value.max() <= 1.0


def test_a_block_that_flips_the_sign_turns_back_and_forth():
    frame = norms(model_of(Flips), some_windows())
    assert values_of(frame, "cosine_next") == pytest.approx({0: -1, 1: -1, 2: -1}, abs=1e-14)
    assert values_of(frame, "cosine_first") == pytest.approx({0: 1, 1: -1, 2: 1, 3: -1}, abs=1e-14)


def test_orthogonal_states_have_cosine_0():
    frame = norms(crafted.with_embedding(model_of(Shifts), torch.eye(16)[0]), some_windows())
    assert values_of(frame, "cosine_next") == {0: 0, 1: 0, 2: 0}
    assert values_of(frame, "cosine_first") == {0: 1, 1: 0, 2: 0, 3: 0}
    assert values_of(frame, "residual_norm") == dict.fromkeys(range(4), 0.25)


@every_design
def test_equals_the_loop_over_tokens(design):
    model, windows = model_of(design, dtype=torch.float64), some_windows()
    states = crafted.states_of(model, windows)
    frame = norms(model, windows)
    crafted.assert_every_value_is_finite(frame, ROWS)
    expected = {block: mean(z.square().mean().sqrt() for z in vectors) for block, vectors in enumerate(states)}
    assert values_of(frame, "residual_norm") == pytest.approx(expected, rel=1e-12)
    expected = {block: mean_cosine(states[block], states[block + 1]) for block in range(3)}
    assert values_of(frame, "cosine_next") == pytest.approx(expected, abs=1e-12)
    expected = {block: mean_cosine(states[0], states[block]) for block in range(4)}
    assert values_of(frame, "cosine_first") == pytest.approx(expected, abs=1e-12)
    assert set(frame.n_tokens) == {21}


def mean(numbers) -> float:
    numbers = list(numbers)
    return float(sum(numbers)) / len(numbers)


def mean_cosine(left, right) -> float:
    return mean(u @ v / u.norm() / v.norm() for u, v in zip(left, right, strict=True))


def test_zero_vectors_are_counted_and_left_out_of_cosines_only():
    rows = torch.ones(29, 16)
    rows[::2, 0] = -1.0
    windows = some_windows()
    frame = norms(crafted.with_embedding(model_of(Vanishes), rows), windows)
    vanished = int((windows[:, :-1] % 2 == 0).sum())
    assert values_of(frame, "zero_vectors") == {1: vanished, 2: vanished, 3: vanished}
    assert values_of(frame, "cosine_next") == pytest.approx({0: 1, 1: 1, 2: 1}, abs=1e-14)
    assert values_of(frame, "residual_norm") == pytest.approx({0: 1} | dict.fromkeys((1, 2, 3), 1 - vanished / 21), rel=1e-14)


@every_design_in_use
def test_bf16_weights_give_no_nan(design):
    crafted.assert_every_value_is_finite(norms(model_of(design, dtype=torch.bfloat16), some_windows()), ROWS)


@every_design_in_use
def test_batches_and_order_change_nothing(design):
    crafted.assert_same_whatever_the_batch(norms, model_of(design))
