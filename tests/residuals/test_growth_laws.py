"""How streams, branches and gradients grow with depth at initialisation: the laws, not the constants.

Hyper-connections and attention residuals start as Pre-LN, to the last digit, which tests of theirs hold. The spread grows as the width
shrinks, so that branches are as large as at width 256 with 0.02.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch.nn import functional as F

from depthbench import build_model

DEPTHS = (6, 24, 48)
WIDTH, VOCABULARY, LENGTH = 128, 1000, 64


class Measured(NamedTuple):
    stream: float  # mean square of the last block's output
    swiglu: list[float]  # mean square of what each block's feed-forward adds
    gradients: list[float]  # norm of each block's gradient


@pytest.fixture(scope="module")
def measured():
    """Measures a design at a depth, once."""

    @cache
    def measure(design, n_layer):
        torch.manual_seed(0)
        model = build_model(
            design, n_layer=n_layer, d_model=WIDTH, n_head=4, vocab_size=VOCABULARY, init_std=0.02 * math.sqrt(256 / WIDTH)
        )
        block = torch.randint(VOCABULARY, (4, LENGTH + 1))
        added = {}
        with model.taps(lambda name, sublayer, value: added.__setitem__((name, sublayer), value)):
            state = model.run(model.embed(block[:, :-1]))
        F.cross_entropy(model.logits(state).flatten(0, 1), block[:, 1:].flatten()).backward()
        return Measured(
            mean_square(model.residual.readout(state, block=n_layer)),
            [mean_square(added["branch_out", 2 * b + 1]) for b in range(n_layer)],
            [math.hypot(*(parameter.grad.norm().item() for parameter in b.parameters())) for b in model.blocks],
        )

    return measure


def mean_square(x):
    return x.detach().square().mean().item()


def power(values, sizes=DEPTHS):
    """The exponent p of values = constant * sizes^p, by least squares in logarithms."""
    x, y = ([math.log(value) for value in column] for column in (sizes, values))
    x, y = ([value - sum(column) / len(column) for value in column] for column in (x, y))
    return sum(a * b for a, b in zip(x, y, strict=True)) / sum(a * a for a in x)


def spread(values):
    return max(values) / min(values)


def test_the_stream_of_pre_ln_grows_in_proportion_to_depth_and_that_of_lns_hardly(measured):
    assert power([measured("pre_ln", depth).stream for depth in DEPTHS]) == pytest.approx(1, abs=0.3)
    assert 0 < power([measured("lns", depth).stream for depth in DEPTHS]) < 0.5


def test_every_sublayer_of_sandwich_ln_adds_unit_variance(measured):
    for depth in DEPTHS:
        assert measured("sandwich_ln", depth).swiglu == pytest.approx([1.0] * depth, rel=0.02)
        assert measured("sandwich_ln", depth).stream == pytest.approx(2 * depth, rel=0.1)


@pytest.mark.parametrize("design", ["deepnorm", "keel"])
def test_a_norm_after_the_addition_keeps_the_stream_at_one(measured, design):
    assert [measured(design, depth).stream for depth in DEPTHS] == pytest.approx([1.0] * 3, rel=1e-3)


def test_swiglus_of_pre_ln_are_equal_and_those_of_lns_fall_with_the_square_of_the_block(measured):
    blocks = range(1, 49)
    assert power(measured("pre_ln", 48).swiglu, blocks) == pytest.approx(0, abs=0.15)
    assert power(measured("lns", 48).swiglu, blocks) == pytest.approx(-2, abs=0.15)


def test_first_over_last_gradient_of_pre_ln_grows_with_the_root_of_depth(measured):
    ratios = [measured("pre_ln", depth).gradients[0] / measured("pre_ln", depth).gradients[-1] for depth in DEPTHS]
    assert power(ratios) == pytest.approx(0.5, abs=0.3)


@pytest.mark.parametrize("depth", DEPTHS)
def test_deepnorm_gives_every_block_the_same_gradient(measured, depth):
    assert spread(measured("deepnorm", depth).gradients) < 1.25


def test_keel_gives_the_first_block_a_gradient_alpha_times_larger_and_all_others_the_same(measured):
    ratios = []
    for depth in DEPTHS:
        first, *others = measured("keel", depth).gradients
        mean = sum(others) / len(others)
        deviation = math.sqrt(sum((gradient - mean) ** 2 for gradient in others) / len(others))
        assert deviation < 0.03 * mean
        ratios.append(first / mean)
    assert ratios[0] > 100
    assert power(ratios) == pytest.approx(1, abs=0.05)
