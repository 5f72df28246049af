"""Curves of recorded scalars over training: one line per run and scalar.

Rows that the store reduced stand for several points: the line is their mean, the band around it goes from their minimum to their maximum,
so that a spike of one step is seen.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from depthbench.figures import designs, palette, style

MAX_TRACES = 24
X_AXES = {"step": style.STEP_AXIS, "tokens": style.TOKENS_AXIS, "wall_s": style.WALL_AXIS}
UNITS = {
    "loss": "loss (nats per token)",
    "train/loss": "training loss (nats per token)",
    "val/loss": "validation loss (nats per token)",
    "val/perplexity": "validation perplexity",
    "train/grad_norm": "gradient norm before clipping",
    "train/grad_norm_clipped": "gradient norm after clipping",
    "train/lr": "learning rate",
    "perf/tokens_per_s": "tokens per second",
    "perf/mfu": "model FLOPs utilisation (fraction of peak)",
    "perf/peak_memory_bytes": "peak memory (bytes)",
}
# What may tell runs apart, in the order in which it is written.
_FIELDS = {
    "arch": "{}",
    "size": "{}",
    "budget": "{}",
    "ratio": "ratio {:.4g}",
    "lr": "lr {:g}",
    "seed": "seed {:.0f}",
    "recipe": "recipe {}",
    "tokens_planned": "{:.3g} tokens",
    "corpus": "{}",
}


def labels(runs: pd.DataFrame) -> dict[str, str]:
    """Run id -> the shortest text that tells the runs apart: only what differs among them, and always the design.

    ``runs`` has one row per run with columns run_id, arch and, where known, options, size, budget, ratio, lr, seed, recipe,
    tokens_planned, corpus.
    """
    runs = runs.assign(arch=designs.names(runs))
    differing = [f for f in _FIELDS if f in runs and (f == "arch" or runs[f].nunique(dropna=False) > 1)]
    texts = {}
    for row in runs.to_dict("records"):
        texts[row["run_id"]] = " · ".join(_FIELDS[f].format(row[f]) for f in differing if pd.notna(row[f]))
    counts = pd.Series(texts).value_counts()
    return {run: text if text and counts[text] == 1 else f"{text} · {run[-8:]}".lstrip(" ·") for run, text in texts.items()}


def styles(runs: pd.DataFrame) -> dict[str, dict[str, str]]:
    """Run id -> color, dash and symbol: the design's own colour, in shades (and dashes) where a design has several runs."""
    order = [c for c in ("ratio", "lr", "seed", "run_id") if c in runs]
    chosen = {}
    for arch, group in runs.sort_values(order).groupby("arch", sort=False, dropna=False):
        chosen.update(zip(group["run_id"], palette.run_styles(str(arch), len(group)), strict=True))
    return chosen


def smooth(scalars: pd.DataFrame, weight: float) -> pd.DataFrame:
    """``scalars`` with a column ``smoothed``: the exponential moving average of ``value`` per run and scalar.

    ``weight`` in [0, 1) is the share of the past. Values that are not finite are left out of the average and stay gaps. Validation is
    an average already, over many tokens at few steps: it stays as it is.
    """
    finite = scalars["value"].where(np.isfinite(scalars["value"]))
    average = finite.groupby([scalars["run_id"], scalars["name"]]).transform(lambda v: v.ewm(alpha=1 - weight, ignore_na=True).mean())
    validation = scalars["name"].str.startswith("val/")
    return scalars.assign(smoothed=average.where(finite.notna()).where(~validation, scalars["value"]))


def figure(
    scalars: pd.DataFrame,
    runs: pd.DataFrame,
    *,
    x: str = "step",
    log_x: bool = False,
    log_y: bool = False,
    smoothing: float = 0.0,
    height: int = 460,
) -> go.Figure:
    """Lines of ``scalars`` (run_id, name, step, tokens, wall_s, value, and where reduced value_min, value_max, n), coloured by design.

    Validation is dotted where training is shown too. ``x``: "step", "tokens" or "wall_s". ``smoothing`` in [0, 1) draws the moving
    average over the faint raw line, so that spikes and gaps stay visible. At most MAX_TRACES lines are drawn; a note in the figure says
    how many were left out.
    """
    text, looks, names = labels(runs), styles(runs), list(dict.fromkeys(scalars["name"]))
    drawn = smooth(scalars, smoothing) if smoothing > 0 else scalars.assign(smoothed=scalars["value"])
    order = {run: i for i, run in enumerate(runs["run_id"])}
    lines = sorted(
        drawn.groupby(["run_id", "name"], sort=False), key=lambda line: (order.get(line[0][0], len(order)), names.index(line[0][1]))
    )
    result = style.base_figure(height=height)
    for (run_id, name), points in lines[:MAX_TRACES]:
        points = points.sort_values("step", kind="stable")
        label = text.get(run_id, run_id)
        look = looks.get(run_id) or palette.run_styles("", 1)[0] | {"color": palette.BASELINE}
        if (smoothing > 0 and not name.startswith("val/")) or ("n" in points and (points["n"] > 1).any()):
            _add_raw(result, points, x=x, color=look["color"], group=run_id)
        named = {trace.legendgroup for trace in result.data if trace.showlegend}
        dotted = name.startswith("val/") and len(names) > 1
        result.add_scatter(
            x=points[x],
            y=points["smoothed"],
            mode="lines+markers" if name.startswith("val/") or len(points) < 3 else "lines",
            name=label,
            legendgroup=run_id,
            showlegend=run_id not in named,
            line={"color": look["color"], "width": 2, "dash": "dot" if dotted else look["dash"]},
            marker={"size": 5, "symbol": look["symbol"]},
            connectgaps=False,
            customdata=np.column_stack([points["step"], points["tokens"], points["wall_s"], points["value"]]),
            hovertemplate=f"<b>{label}</b><br>{name} %{{customdata[3]:.4f}}<br>step %{{customdata[0]:,.0f}} · %{{customdata[1]:.4s}} tokens"
            f" · %{{customdata[2]:,.0f}} s<br>{run_id}<extra></extra>",
        )
    if len(lines) > MAX_TRACES:
        note = f"{MAX_TRACES} of {len(lines)} lines drawn"
        result.add_annotation(text=note, xref="paper", yref="paper", x=1, y=1.04, xanchor="right", showarrow=False)
    result.update_layout(showlegend=True)
    result.update_xaxes(title_text=X_AXES[x] + (", log scale" if log_x else ""), type="log" if log_x else "linear")
    result.update_yaxes(title_text=_y_title(names) + (", log scale" if log_y else ""), type="log" if log_y else "linear")
    return result


def _add_raw(result: go.Figure, points: pd.DataFrame, *, x: str, color: str, group: str) -> None:
    """What lies behind a line, faint: the band of reduced points, or the recorded line behind a smoothed one."""
    common = {"hoverinfo": "skip", "showlegend": False, "legendgroup": group}
    if "n" in points and (points["n"] > 1).any():
        band = points[np.isfinite(points["value_min"]) & np.isfinite(points["value_max"])]
        edges = np.concatenate([band["value_max"], band["value_min"].iloc[::-1]])
        around = np.concatenate([band[x], band[x].iloc[::-1]])
        result.add_scatter(x=around, y=edges, mode="lines", line={"width": 0}, fill="toself", fillcolor=color, opacity=0.18, **common)
    else:
        result.add_scatter(x=points[x], y=points["value"], mode="lines", line={"color": color, "width": 1}, opacity=0.3, **common)


def _y_title(names: list[str]) -> str:
    if len(names) == 1:
        return UNITS.get(names[0], names[0])
    kinds = {name.split("/")[-1] for name in names}
    unit = UNITS.get(kinds.pop(), "value") if len(kinds) == 1 else "value"
    return unit + (", validation dotted" if any(n.startswith("val/") for n in names) else "")
