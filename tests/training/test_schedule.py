"""The learning-rate list of a run against the formula of conf/recipes.yaml, written out by hand."""

import math

import pytest

from depthbench.training.schedule import learning_rate_factor


def factors(total, warmup=0.1, final=0.1):
    return [learning_rate_factor(t, total_steps=total, warmup_fraction=warmup, final_fraction=final) for t in range(total)]


def test_first_peak_and_last_value():
    lrs = factors(1000)
    assert lrs[0] == 1 / 100
    assert lrs[99] == 1.0 and max(lrs) == 1.0 and lrs.index(1.0) == 99
    assert lrs[-1] == pytest.approx(0.1, abs=1e-15)


def test_whole_list_against_the_formula():
    expected = [(t + 1) / 20 for t in range(20)] + [0.1 + 0.45 * (1 + math.cos(math.pi * n / 180)) for n in range(1, 181)]
    assert factors(200) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("total", [1, 2, 3, 9, 10, 11])
def test_short_plans_never_have_a_learning_rate_of_zero(total):
    lrs = factors(total)
    assert all(0.1 <= lr <= 1.0 for lr in lrs)
    assert lrs[0] == 1.0 if total < 15 else lrs[0] > 0


def test_steps_beyond_the_plan_keep_the_final_fraction():
    assert learning_rate_factor(500, total_steps=100, warmup_fraction=0.1, final_fraction=0.1) == pytest.approx(0.1)
