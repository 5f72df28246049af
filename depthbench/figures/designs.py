"""What a run's design is called where variants of one design stand side by side: its name and the options that are not its defaults."""

from __future__ import annotations

import json

import pandas as pd


def option_text(options: str | None) -> str:
    """The store's options (JSON) as a person reads them: ``streams=2 norm_then_sum=true``; empty where there are none."""
    chosen = json.loads(options) if isinstance(options, str) and options else {}
    return " ".join(f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in sorted(chosen.items()))


def names(runs: pd.DataFrame) -> pd.Series:
    """For each run its design's name, and after a blank its options: equal exactly where the designs are."""
    if "options" not in runs:
        return runs["arch"]
    return runs["arch"].where(runs["arch"].isna(), runs["arch"].astype(str) + runs["options"].map(_after_a_blank))


def _after_a_blank(options: str | None) -> str:
    text = option_text(options)
    return text and f" {text}"
