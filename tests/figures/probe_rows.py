"""Probe rows made by hand: a run with all eleven probes, every value known."""

from __future__ import annotations

import pandas as pd

STEP, TOKENS, WINDOWS, LENGTH = 40, 40960, 8, 64
COLUMNS = ["probe", "metric", "i", "j", "value", "n_tokens", "rule", "status", "note", "step", "tokens", "windows", "length"]


def row(probe: str, metric: str, value: float | None, i: int | None = None, j: int | None = None, rule=None, note=None) -> dict:
    status = "not_defined" if value is None else "ok"
    facts = {"n_tokens": WINDOWS * LENGTH, "step": STEP, "tokens": TOKENS, "windows": WINDOWS, "length": LENGTH}
    return {"probe": probe, "metric": metric, "i": i, "j": j, "value": value, "rule": rule, "status": status, "note": note, **facts}


def measured(n_layer: int = 4, *, slots: str = "stream", rules: tuple[str, ...] = ("identity",)) -> pd.DataFrame:
    """As the store returns them. ``slots``: "stream", "streams" or "sources", as a design's."""
    blocks, states = range(n_layer), range(n_layer + 1)
    rows = [row("angular", "distance", (j - i) / (n_layer + 1), i, j) for i in states for j in states if i < j]
    for factor, rule in enumerate(rules, start=1):
        rows += [row("causal", "score", factor * 0.1 * (j - i), i, j, rule) for i in blocks for j in blocks if i < j]
        rows += [row("causal", "mean", 0.05 * factor, rule=rule), row("causal", "late_fraction", 0.25 * factor, rule=rule)]
        rows += [row("pruning", "delta", factor * (0.1 * i - 0.1), i, rule=rule) for i in blocks]
        rows += [row("pruning", "loss", 3.25, rule=rule)]
    rows += [row("permutation", "score", 0.01 * (i + j), i, j) for i in blocks for j in blocks if i < j]
    rows += [row("permutation", "mean", 0.03), row("permutation", "late_fraction", 0.5), row("permutation", "loss", 3.25)]
    for at in states:
        rows += [row("logit_lens", "loss", 7.25 - at, at), row("logit_lens", "kl", float(n_layer - at), at)]
        rows += [row("logit_lens", "top5_overlap", at / n_layer, at)]
        rows += [row("collapse", metric, 1.0 + at, at) for metric in ("stable_rank", "effective_rank", "nuclear_ratio")]
        rows += [row("norms", "residual_norm", 1.0 + at, at), row("norms", "cosine_first", 1 - at / 10, at)]
    rows += [row("norms", "cosine_next", 0.9, at) for at in blocks]
    rows += [row("jacobian", "deviation", 1.0 / (1 + at), at) for at in blocks] + [row("jacobian", "stderr", 0.01, at) for at in blocks]
    rows += [row("paths", "weight", 1.0, i, at) for at in range(2 * n_layer + 1) for i in range(at + 1)]
    return pd.DataFrame(rows + _of_slots(n_layer, slots), columns=COLUMNS).astype({"i": "float64", "j": "float64"})


def _of_slots(n_layer: int, slots: str) -> list[dict]:
    if slots == "sources":
        rows = [row("usefulness", "loss_ratio", None, note="a block reads all sources")]
        rows += [row("transport", "depth_weight", 1 / (at + 1), i, at) for at in range(2 * n_layer + 1) for i in range(at + 1)]
        rows += [row("transport", "running_weight", 0.001 if at < 2 else 0.3, at) for at in range(1, 2 * n_layer)]
        return [*rows, row("transport", "dead_segment", 1.0)]
    rows = [row("usefulness", "loss_ratio", 1.0 + 0.06 * at, at) for at in range(n_layer)] + [row("usefulness", "useful_fraction", 0.5)]
    if slots == "stream":
        return [*rows, row("transport", "effective_rank", None, note="one stream: nothing is mixed")]
    for a in range(n_layer):
        for b in range(a + 1, n_layer + 1):
            rows += [row("transport", "effective_rank", 1 + 1 / (b - a), a, b), row("transport", "column_cosine", 1 - 1 / (b - a), a, b)]
            rows += [row("transport", "singular_value_1", 1.0 + a / 10, a, b), row("transport", "singular_value_2", 1 / (b - a), a, b)]
    return rows
