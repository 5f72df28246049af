"""Which models are larger than their budget allows."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from depthbench.figures import budgets


def model(**more) -> dict:
    usual = {"size": "nano", "budget": "total", "params_total": 2_000_000, "params_backbone": 1_400_000, "budget_params": 2_000_000}
    return usual | more


def test_only_what_exceeds_the_sizes_tolerance_is_over_budget():
    frame = pd.DataFrame(
        [
            model(params_total=2_069_000),
            model(params_total=2_080_000),
            model(params_total=1_000_000),
            model(size="pico", params_total=2_080_000),  # its tolerance is 5 %
            model(budget="backbone", params_total=9_000_000, params_backbone=2_000_000),
            model(budget="backbone", params_total=1_000_000, params_backbone=2_200_000),
        ]
    )
    assert list(budgets.over_budget(frame)) == pytest.approx([np.nan, 0.04, np.nan, np.nan, np.nan, 0.1], nan_ok=True)


def test_what_is_unknown_is_not_marked():
    frame = pd.DataFrame([model(size="gone", params_total=9e9), model(size=None), model(params_total=None), model(budget_params=None)])
    assert budgets.over_budget(frame).isna().all()


def test_the_mark_is_empty_where_there_is_nothing_to_mark():
    assert [budgets.mark(x) for x in (0.0714, np.nan)] == ["7.1 % over", ""]
