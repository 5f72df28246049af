"""The line that sums a measurement up says what its rows say."""

from __future__ import annotations

import math

import pytest

from depthbench.probes.base import Rows
from depthbench.probes.headlines import headline


def rows_of(metric, values):
    rows = Rows(1)
    for i, value in enumerate(values):
        rows.add(metric, value, i)
    return rows


@pytest.mark.parametrize(
    ("losses", "where"),
    [
        ([3.0, 2.1, 2.0], "within 10 % of it from boundary 1 of 2"),
        ([2.0, 9.0, 2.1, 2.0], "within 10 % of it from boundary 2 of 3"),  # one that is close and not kept up does not count
        ([2.0, math.nan, 2.0], "within 10 % of it from boundary 2 of 2"),
        ([2.0, 2.0, 2.0], "within 10 % of it from boundary 0 of 2"),
        ([2.0, 2.0, math.nan], "NaN among the losses"),
    ],
)
def test_an_early_exit_is_close_from_where_on_it_stays_close(losses, where):
    assert headline("logit_lens", rows_of("loss", losses).frame()).endswith(where)


def test_usefulness_counts_the_blocks_that_have_a_ratio():
    rows = rows_of("loss_ratio", [1.5, 1.0, math.nan])
    rows.add("useful_fraction", 0.5)
    assert headline("usefulness", rows.frame()) == "50% of 2 blocks useful; median loss ratio 1.250"
    rows = rows_of("loss_ratio", [math.nan])
    rows.add("useful_fraction", math.nan)
    assert headline("usefulness", rows.frame()) == "NaN wherever a map stands in for a block"
