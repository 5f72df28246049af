"""Angular distance: known angles, the double loop it stands for, and vectors that are nearly or exactly alike."""

from __future__ import annotations

import math
import sys
from itertools import combinations

import pytest
import torch

from depthbench.probes.angular import angles_between, angular, directions
from tests.probes import crafted
from tests.probes.crafted import Doubles, Flips, Shifts, Vanishes, every_design, every_design_in_use, model_of, some_windows, values_of

module = sys.modules["depthbench.probes.angular"]  # the package shows the function under this name
PAIRS = list(combinations(range(4), 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_identity_blocks_are_exactly_0_apart(dtype):
    frame = angular(crafted.with_idle_blocks(model_of(dtype=dtype)), some_windows())
    assert values_of(frame, "distance") == dict.fromkeys(PAIRS, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_block_that_flips_the_sign_is_1_away_and_two_are_none(dtype):
    frame = angular(model_of(Flips, dtype=dtype), some_windows())
    assert values_of(frame, "distance") == {(i, j): float((j - i) % 2) for i, j in PAIRS}


def test_orthogonal_states_are_half_a_turn_apart():
    model = crafted.with_embedding(model_of(Shifts), torch.eye(16)[0])
    assert values_of(angular(model, some_windows()), "distance") == dict.fromkeys(PAIRS, 0.5)


def test_length_plays_no_part():
    model = crafted.with_embedding(model_of(Doubles), 1e30 * torch.ones(16))
    assert values_of(angular(model, some_windows()), "distance") == dict.fromkeys(PAIRS, 0.0)


@every_design
def test_equals_the_double_loop(design, monkeypatch):
    """In chunks of a token or two as well."""
    model, windows = model_of(design, dtype=torch.float64), some_windows()
    states = crafted.states_of(model, windows)
    expected = {(i, j): mean_angle(states[i], states[j]) for i, j in PAIRS}
    for scratch in (module.SCRATCH, 200):
        monkeypatch.setattr(module, "SCRATCH", scratch)
        frame = angular(model, windows)
        crafted.assert_every_value_is_finite(frame, {"distance": 6})
        assert values_of(frame, "distance") == pytest.approx(expected, abs=1e-9)
        assert set(frame.n_tokens) == {21}


def mean_angle(left, right) -> float:
    cosines = [float(u @ v / u.norm() / v.norm()) for u, v in zip(left, right, strict=True)]
    return sum(math.acos(max(-1.0, min(1.0, cosine))) for cosine in cosines) / math.pi / len(cosines)


@pytest.mark.parametrize("angle", [1e-9, 1e-5, 1.3e-3, 1.5e-3, 1.0, math.pi - 1e-5, math.pi - 1e-9])
def test_angles_keep_their_digits_at_both_ends(angle):
    units = torch.tensor([[[1.0, 0.0], [math.cos(angle), math.sin(angle)]]], dtype=torch.float64)
    found = angles_between(units, torch.tensor([0]), torch.tensor([1])).item()
    assert found == pytest.approx(angle, rel=1e-7 if angle < 3 else 1e-12)


def test_near_pairs_in_many_parts_equal_them_at_once(monkeypatch):
    base = torch.randn(50, 1, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = torch.randn(50, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    units, _ = directions(base + 1e-6 * noise)
    first, second = torch.triu_indices(5, 5, 1)
    expected = angles_between(units, first, second)
    monkeypatch.setattr(module, "SCRATCH", 24)
    assert torch.equal(angles_between(units, first, second), expected)
    assert (expected > 0).all()


def test_zero_vectors_are_counted_and_left_out():
    rows = torch.ones(29, 16)
    rows[::2, 0] = -1.0
    windows = some_windows()
    frame = angular(crafted.with_embedding(model_of(Vanishes), rows), windows)
    assert values_of(frame, "distance") == dict.fromkeys(PAIRS, 0.0)  # of those that stay
    vanished = int((windows[:, :-1] % 2 == 0).sum())
    assert values_of(frame, "zero_vectors") == {1: vanished, 2: vanished, 3: vanished}
    assert 0 < vanished < 21


def test_a_state_of_zeros_alone_has_no_distance():
    frame = angular(crafted.with_embedding(model_of(Vanishes), -torch.ones(16)), some_windows())
    assert frame[frame.metric == "distance"].value.isna().all()
    assert values_of(frame, "zero_vectors") == {1: 21, 2: 21, 3: 21}


@every_design_in_use
def test_bf16_weights_give_no_nan(design):
    crafted.assert_every_value_is_finite(angular(model_of(design, dtype=torch.bfloat16), some_windows()), {"distance": 6})


@every_design_in_use
def test_batches_and_order_change_nothing(design):
    crafted.assert_same_whatever_the_batch(angular, model_of(design))
