"""Models that their design's own parameters take out of the parameter budget."""

from __future__ import annotations

import pandas as pd

from depthbench.errors import UserError
from depthbench.shapes import size_named


def over_budget(runs: pd.DataFrame) -> pd.Series:
    """For each run by how much its parameters exceed the budget, as a fraction of it; NaN within the size's tolerance.

    ``runs`` has columns size, budget ("total" or "backbone": what counts), params_total, params_backbone and budget_params. NaN too where
    one of them is missing or this version does not know the size.
    """
    counted = runs["params_backbone"].where(runs["budget"] == "backbone", runs["params_total"]).astype(float)
    excess = counted / runs["budget_params"].astype(float) - 1
    return excess.where(excess > runs["size"].map(_tolerance).astype(float))


def mark(excess: float) -> str:
    """``excess`` of `over_budget` in words; empty for NaN."""
    return "" if pd.isna(excess) else f"{100 * excess:.1f} % over"


def _tolerance(size: str | None) -> float:
    try:
        return size_named(size).tolerance
    except UserError:
        return float("nan")
