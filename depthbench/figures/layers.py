"""Layer statistics: a layer x step heatmap per run, and the profile over depth at one step.

Blocks count from 0. With relative depth, block l of L covers l/L to (l+1)/L, so that models of different depths overlay.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from depthbench.figures import palette, style

MAX_PANELS = 4
MAX_STEPS = 400
QUANTILES = (0.01, 0.99)
SITES = {"block_out": "block output", "attn_branch": "attention branch", "ffn_branch": "feed-forward branch"}
METRICS = {  # the most telling first
    "norm": "L2 norm",
    "residual_norm": "residual norm ‖z‖ / √width",
    "cosine_drift": "cosine drift 1 − cos(z_l, z_l+1)",
    "variance": "variance",
    "magnitude": "mean absolute value",
    "mean": "mean",
    "skip_delta": "loss with the block skipped − loss (nats)",
}


def title(metric: str, site: str, direction: str) -> str:
    """Axis and colour-bar title of a layer statistic."""
    of = "" if metric in ("residual_norm", "cosine_drift", "skip_delta") else f" of the {SITES.get(site, site)}"
    gradient = " gradient" if direction == "backward" else ""
    return METRICS.get(metric, metric) + of + gradient


def reduce_steps(stats: pd.DataFrame, limit: int = MAX_STEPS) -> pd.DataFrame:
    """At most ``limit`` of the recorded steps: of each stretch of neighbours the one whose profile lies farthest from the stretch's median.

    Every value shown is a recorded one, and a spike (or a value that is not finite) at a single step survives.
    """
    steps = np.sort(stats["step"].unique())
    if len(steps) <= limit:
        return stats
    grid = stats.pivot_table(index="step", columns="layer", values="value", aggfunc="last", dropna=False).reindex(steps)
    kept = []
    for rows in np.array_split(np.arange(len(steps)), limit):
        block = grid.iloc[rows].to_numpy(float)
        finite = np.isfinite(block)
        median = np.nanmedian(np.where(finite, block, np.nan), axis=0) if finite.any(axis=0).all() else np.zeros(block.shape[1])
        score = np.where(finite, np.abs(block - median), np.inf).max(axis=1)
        kept.append(steps[rows[int(score.argmax())]])
    return stats[stats["step"].isin(kept)]


def extremes(stats: pd.DataFrame) -> pd.DataFrame:
    """Rows that the store reduced (columns value, value_min, value_max, n, n_finite) with the value farthest from their mean as ``value``.

    A row of one step keeps its value. A row over several steps of which one is not finite is NaN: it must be seen.
    """
    upper = stats["value_max"] - stats["value"] >= stats["value"] - stats["value_min"]
    farthest = stats["value_max"].where(upper, stats["value_min"]).where(stats["n_finite"] == stats["n"])
    return stats.assign(value=stats["value"].where(stats["n"] == 1, farthest))


def can_log(values: pd.Series) -> bool:
    """Whether a logarithmic colour or axis shows every finite value."""
    finite = values[np.isfinite(values)]
    return bool(len(finite)) and bool((finite > 0).all())


def limits(values: pd.Series, *, log: bool = False) -> tuple[float, float]:
    """Colour limits from the 1 % and 99 % quantiles of the finite values, in log10 where ``log``; symmetric about 0 for signed values."""
    finite = values[np.isfinite(values)].astype(float)
    if log:
        finite = np.log10(finite[finite > 0])
    if finite.empty:
        return 0.0, 1.0
    low, high = (float(q) for q in finite.quantile(list(QUANTILES)))
    if not log and low < 0 < high:
        low, high = -max(-low, high), max(-low, high)
    if low == high:
        pad = abs(low) * 0.05 or 0.5
        low, high = low - pad, high + pad
    return low, high


def heatmap(
    panels: dict[str, pd.DataFrame],
    depths: dict[str, int],
    *,
    name: str,
    x: str = "step",
    log: bool = False,
    relative: bool = False,
    mark: dict[str, float] | None = None,
) -> go.Figure:
    """Layer x step heatmaps, one panel per run, with shared colour limits.

    ``panels``: title -> rows (step, tokens, layer, value); ``depths``: title -> number of blocks. ``name``: title of the colour bar.
    ``x``: "step" or "tokens". ``mark``: title -> x of a vertical line, the step of the profile. Cells that were recorded but are not finite
    have the colour palette.NOT_FINITE, named in the legend; cells that were not recorded stay empty.
    """
    shown = dict(list(panels.items())[:MAX_PANELS])
    columns = 1 if len(shown) == 1 else 2
    rows = -(-len(shown) // columns)
    result = make_subplots(
        rows, columns, subplot_titles=list(shown) if len(shown) > 1 else None, vertical_spacing=0.16, horizontal_spacing=0.1
    )
    every = pd.concat([p["value"] for p in shown.values()])
    low, high = limits(every, log=log)
    signed = not log and low < 0 < high
    lost = False
    for i, (run, stats) in enumerate(shown.items()):
        where = {"row": i // columns + 1, "col": i % columns + 1}
        lost |= _add_panel(result, stats, depths[run], where, x=x, log=log, relative=relative)
        result.update_xaxes(type="linear", title_text=style.STEP_AXIS if x == "step" else style.TOKENS_AXIS, **where)
        result.update_yaxes(type="linear", title_text="relative depth l / L" if relative else "block l (0 = first)", **where)
        result.update_yaxes(range=[0, 1] if relative else [-0.5, depths[run] - 0.5], **where)
        if mark and run in mark:
            result.add_vline(x=mark[run], line={"color": "rgba(255,255,255,0.85)", "width": 1.5, "dash": "dot"}, **where)
    scale = palette.DIVERGING if signed else palette.SEQUENTIAL
    bar = {"title": {"text": name, "side": "right"}, "thickness": 14, "outlinewidth": 0, "len": 1, "y": 0.5, "yanchor": "middle", "ypad": 0}
    if log:
        ticks = _log_ticks(low, high)
        bar |= {"tickvals": np.log10(ticks), "ticktext": [f"{t:.3g}" for t in ticks]}
    result.update_layout(coloraxis={"colorscale": scale, "cmin": low, "cmax": high, "colorbar": bar})
    if lost:
        marker = {"symbol": "square", "size": 11, "color": palette.NOT_FINITE}
        result.add_scatter(x=[None], y=[None], mode="markers", marker=marker, name="not finite (NaN or infinite)", showlegend=True)
    return _finish(result, height=430 if rows == 1 else 330 * rows)


def _add_panel(result: go.Figure, stats: pd.DataFrame, depth: int, where: dict, *, x: str, log: bool, relative: bool) -> bool:
    """One run's cells; returns whether any of them is not finite."""
    grid = stats.pivot_table(index="layer", columns=x, values="value", aggfunc="last", dropna=False).reindex(range(depth))
    seen = stats.assign(one=1).pivot_table(index="layer", columns=x, values="one", aggfunc="last").reindex(grid.index)
    seen = seen.reindex(columns=grid.columns).notna().to_numpy()
    values = grid.to_numpy(float)
    bad = seen & ~np.isfinite(values)
    z = np.where(np.isfinite(values), values, np.nan)
    if log:
        z = np.log10(np.where(z > 0, z, np.nan))
    y = np.arange(depth + 1) / depth if relative else np.arange(depth)
    at = grid.columns.to_numpy(float)
    common = {"x": at, "y": y, "hoverongaps": False, "xgap": 0, "ygap": 0}
    of = f" of {depth}"
    over = "step" if x == "step" else "tokens"
    result.add_heatmap(
        z=z,
        coloraxis="coloraxis",
        customdata=np.stack([values, np.broadcast_to(np.arange(depth)[:, None], values.shape)], axis=-1),
        hovertemplate=f"block %{{customdata[1]}}{of} · {over} %{{x:,.0f}}<br><b>%{{customdata[0]:.4g}}</b><extra></extra>",
        **common,
        **where,
    )
    if bad.any():
        text = np.where(bad, np.where(np.isnan(values), "NaN", np.where(values > 0, "inf", "-inf")), "")
        result.add_heatmap(
            z=np.where(bad, 1.0, np.nan),
            colorscale=[[0, palette.NOT_FINITE], [1, palette.NOT_FINITE]],
            showscale=False,
            name="not finite",
            customdata=np.stack([text, np.broadcast_to(np.arange(depth)[:, None].astype(str), text.shape)], axis=-1),
            hovertemplate=f"block %{{customdata[1]}}{of} · {over} %{{x:,.0f}}<br><b>%{{customdata[0]}}</b><extra></extra>",
            **common,
            **where,
        )
    return bool(bad.any())


def at_step(stats: pd.DataFrame, step: float) -> pd.DataFrame:
    """The rows of the recorded step nearest to ``step``, by layer."""
    if stats.empty:
        return stats
    steps = stats["step"].unique()
    nearest = steps[np.abs(steps - step).argmin()]
    return stats[stats["step"] == nearest].sort_values("layer")


def profile(
    panels: dict[str, pd.DataFrame],
    depths: dict[str, int],
    colors: dict[str, str],
    *,
    name: str,
    log: bool = False,
    relative: bool = False,
) -> go.Figure:
    """A statistic over depth, one line per run: ``panels`` holds each run's rows of one step (``at_step``)."""
    result = style.base_figure(height=430, legend="bottom" if len(panels) > 1 else "none")
    for run, rows in panels.items():
        depth = depths[run]
        values = rows["value"].astype(float)
        step = rows["step"].iloc[0] if len(rows) else 0
        result.add_scatter(
            x=(rows["layer"] + 1) / depth if relative else rows["layer"],
            y=values.where(np.isfinite(values)),
            mode="lines+markers",
            name=run,
            line={"color": colors[run], "width": 2},
            marker={"size": 5},
            connectgaps=False,
            customdata=rows["layer"],
            hovertemplate=f"<b>{run}</b><br>block %{{customdata}} of {depth} · step {step:,.0f}<br>%{{y:.4g}}<extra></extra>",
        )
    longest = max(depths[run] for run in panels) if panels else 1
    result.update_xaxes(
        type="linear",
        title_text="relative depth l / L" if relative else "block l (0 = first)",
        range=[0, 1.02] if relative else [-0.5, longest - 0.5],
    )
    result.update_yaxes(type="log" if log else "linear", title_text=name + (", log scale" if log else ""))
    return result


def _log_ticks(low: float, high: float) -> np.ndarray:
    """Round values between 10**low and 10**high, the more per decade the fewer decades there are."""
    span = high - low
    per_decade = [1] if span > 3 else [1, 2, 5] if span > 1 else [1, 1.5, 2, 3, 4, 5, 7]
    ticks = np.concatenate([np.array(per_decade) * 10.0**k for k in np.arange(np.floor(low), np.ceil(high) + 1)])
    inside = ticks[(np.log10(ticks) >= low - 1e-9) & (np.log10(ticks) <= high + 1e-9)]
    return inside if len(inside) >= 2 else 10.0 ** np.array([low, high])


def _finish(result: go.Figure, *, height: int) -> go.Figure:
    result.update_xaxes(**{**style.axis_style(), "showgrid": False})
    result.update_yaxes(**{**style.axis_style(), "showgrid": False})
    result.update_layout(
        height=height,
        margin={"l": 64, "r": 16, "t": 36, "b": 56},
        **style.BACKGROUND,
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"},
    )
    return result
