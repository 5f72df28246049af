"""Validation loss against aspect ratio: does a design gain from depth at a fixed parameter budget?

A line never mixes what cannot be compared: the runs given to ``points`` share size, budget and corpus, and one text of ``recipes``.
"""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from depthbench.figures import budgets, designs, palette, style
from depthbench.resources import resource


def compact(count: float) -> str:
    """A count in as few characters as say it exactly: 3.584M."""
    scale, unit = next((s, u) for s, u in ((1e9, "B"), (1e6, "M"), (1e3, "k"), (1, "")) if count >= s or s == 1)
    return f"{count / scale:.12g}{unit}"


# Besides size, budget and corpus: what must be equal for two losses to be compared, and how it is written.
RECIPE = {
    "recipe": lambda v: f"recipe {v}",
    "tokens_planned": lambda v: f"{compact(v)} tokens",
    "batch_tokens": lambda v: f"batch {v:.0f}",
    "seq_len": lambda v: f"length {v:.0f}",
    "precision": str,
    "tokenizer": str,
    "corpus_fingerprint": lambda v: f"data {str(v)[:8]}",
}
LOSSES = {"best": "val_loss_best", "last": "val_loss"}
RATIO_AXIS = "aspect ratio d_model / n_layer, log scale (wide and shallow to the right)"
BASE_TOLERANCE = 1.15  # a point counts as the base shape when its ratio is within 15 % of the one asked for
LONE_REACH = 0.1  # nats shown above and below a lone point: there, no spread of points says how much is much
_SHAPE = ["arch", "n_layer", "d_model"]


def recipes(runs: pd.DataFrame) -> pd.Series:
    """For each run a text that is equal exactly where the recipe is: what differs among ``runs``; where nothing does, the tokens."""
    shown = [c for c in RECIPE if c in runs and runs[c].nunique(dropna=False) > 1] or ["tokens_planned"]
    texts = [runs[c].map(lambda v, c=c: RECIPE[c](v) if pd.notna(v) else f"{c} unknown") for c in shown]
    return texts[0].str.cat(texts[1:], sep=" · ") if texts[1:] else texts[0]


def complete(runs: pd.DataFrame) -> pd.Series:
    """Which runs have seen all the tokens they planned (a run stopped early by max_steps is no point of a comparison)."""
    planned = runs["tokens_planned"].fillna(0)
    return (runs["status"] == "finished") & (runs["tokens_done"].fillna(0) >= 0.99 * planned)


def stopped_early(runs: pd.DataFrame) -> pd.Series:
    """Which runs were asked to end before their planned tokens (max_steps), and did."""
    return (runs["status"] == "finished") & ~complete(runs)


def points(runs: pd.DataFrame, *, loss: str = "best", lr: float | None = None) -> pd.DataFrame:
    """One row per design and shape: the mean validation loss over seeds at the best learning rate. Other options are another design.

    ``runs`` must be comparable: one size, budget, corpus and recipe. ``loss``: "best" or "last" validation of a run. ``lr``: only runs of
    this learning rate; None takes for each point the one with the lowest mean. Of repeated runs of one learning rate and seed the
    newest counts. Values that are not finite are left out: ``n`` seeds count of ``n_runs``. ``sd`` is the sample standard deviation,
    NaN for one seed. ``seeds`` and ``runs`` name what is in the mean. ``over_budget``: see `budgets.over_budget`.
    """
    columns = [*_SHAPE, "ratio", "params_total", "over_budget", "lr", "loss", "sd", "n", "n_runs", "n_lr", "seeds", "runs"]
    runs = runs.assign(arch=designs.names(runs), value=runs[LOSSES[loss]].astype(float), over_budget=budgets.over_budget(runs))
    if lr is not None:
        runs = runs[np.isclose(runs["lr"], lr, rtol=1e-9)]
    runs = runs.sort_values("created_at").drop_duplicates([*_SHAPE, "lr", "seed"], keep="last")
    rows = []
    for shape, group in runs.groupby(_SHAPE, sort=True):
        by_lr = [_point(rate, seeds) for rate, seeds in group.groupby("lr", sort=True)]
        finite = [p for p in by_lr if p["n"]]
        if finite:
            best = min(finite, key=lambda p: p["loss"])
            fixed = {c: group[c].iloc[0] for c in ("ratio", "params_total", "over_budget")} | {"n_lr": len(by_lr)}
            rows.append(dict(zip(_SHAPE, shape, strict=True)) | fixed | best)
    return pd.DataFrame(rows, columns=columns)


def _point(lr: float, seeds: pd.DataFrame) -> dict:
    good = seeds[np.isfinite(seeds["value"])].sort_values("seed")
    return {
        "lr": lr,
        "loss": good["value"].mean(),
        "sd": good["value"].std(ddof=1),
        "n": len(good),
        "n_runs": len(seeds),
        "seeds": ", ".join(f"{s:.0f}" for s in good["seed"]),
        "runs": ", ".join(good["run_id"]),
    }


def paper_points() -> pd.DataFrame:
    """The reference's figure 2 (400M total): arch, ratio, n_layer, loss; shapes without a published value are left out."""
    figure_2 = json.loads(resource("conf", "paper.json").read_text(encoding="utf-8"))["figure_2_validation_loss_400m"]
    ratios, depths = figure_2["ratios"], figure_2["n_layer"]
    rows = [
        {"arch": arch, "ratio": ratio, "n_layer": depth, "loss": loss}
        for arch, losses in figure_2.items()
        if arch not in ("ratios", "n_layer")
        for ratio, depth, loss in zip(ratios, depths, losses, strict=True)
        if loss is not None
    ]
    return pd.DataFrame(rows)


def paper_base_ratio() -> float:
    """Aspect ratio of the base shape of the reference's 400M ladder."""
    shapes = json.loads(resource("conf", "paper.json").read_text(encoding="utf-8"))["shapes"]["400m_total"]
    return next(shape["ratio"] for shape in shapes if shape.get("base"))


def deltas(frame: pd.DataFrame, base_ratio: float) -> pd.DataFrame:
    """``frame`` with a column ``delta``: loss minus the same design's loss at its base shape.

    The base shape is the point whose ratio is nearest to ``base_ratio`` in log distance, within 15 %. Designs without one are left out:
    there is nothing to take the difference from.
    """
    kept = []
    for _, line in frame.groupby("arch", sort=False):
        distance = np.abs(np.log(line["ratio"].astype(float) / base_ratio))
        if distance.min() <= np.log(BASE_TOLERANCE):
            kept.append(line.assign(delta=line["loss"] - line.loc[distance.idxmin(), "loss"]))
    return pd.concat(kept) if kept else frame.iloc[:0].assign(delta=[])


def figure(frame: pd.DataFrame, *, paper: pd.DataFrame | None = None, loss: str = "best", height: int = 520) -> go.Figure:
    """One line per design over ratio. With a column ``delta`` in ``frame`` differences from the base shape are drawn, else losses.

    ``paper``: the reference's points with their deltas, drawn dashed in the design's colour; only allowed in the delta view, because
    losses of another size and corpus do not belong on one axis with ours (ValueError).
    """
    delta = "delta" in frame
    if paper is not None and not (delta and "delta" in paper):
        raise ValueError("the reference's values are only shown as differences from each line's base shape")
    result = style.base_figure(height=height)
    y = "delta" if delta else "loss"
    for arch, line in frame.groupby("arch", sort=True):
        _add_line(result, str(arch), line.sort_values("ratio"), y)
    for arch, line in [] if paper is None else paper.groupby("arch", sort=False):
        _add_paper_line(result, str(arch), line.sort_values("ratio"), ours=arch in set(frame["arch"]))
    if delta:
        result.add_hline(y=0, line={"color": style.AXIS, "width": 1, "dash": "dot"})
    ratios = pd.concat([f["ratio"] for f in (frame, paper) if f is not None and len(f)] or [pd.Series([4.0, 64.0])]).astype(float)
    low, high = ratios.min(), ratios.max()
    margin = 1.2 if high > low else 4.0
    ticks = 2.0 ** np.arange(np.floor(np.log2(low / margin)), np.ceil(np.log2(high * margin)) + 1)  # each tick is twice as wide
    result.update_xaxes(type="log", title_text=RATIO_AXIS, tickvals=ticks, ticktext=[f"{t:.3g}" for t in ticks])
    result.update_xaxes(range=[np.log10(low / margin), np.log10(high * margin)])
    if len(frame) == 1 and paper is None:
        middle, deviation = frame[y].iloc[0], frame["sd"].iloc[0]
        reach = max(LONE_REACH, 1.5 * deviation) if deviation > 0 else LONE_REACH
        result.update_yaxes(range=[middle - reach, middle + reach])
    title = f"{loss} validation loss" if not delta else f"{loss} validation loss minus that of the base shape"
    result.update_yaxes(type="linear", title_text=f"{title} (nats per token)")
    result.update_layout(showlegend=True)
    return result


def _add_line(result: go.Figure, arch: str, line: pd.DataFrame, y: str) -> None:
    several = line["n"] > 1
    bars = {"type": "data", "array": line["sd"].where(several), "visible": True, "thickness": 1.2, "width": 4} if several.any() else None
    spread = np.where(several, line["sd"].map(lambda s: f" ± {s:.4f} (1 sd)"), "")
    rate = np.where(line["n_lr"] > 1, [f"lr {lr:g}, best of {k}" for lr, k in zip(line["lr"], line["n_lr"], strict=True)], "")
    rate = np.where(rate == "", line["lr"].map(lambda lr: f"lr {lr:g}"), rate)
    lost = np.where(line["n_runs"] > line["n"], [f" of {k}" for k in line["n_runs"]], "")
    over = [f" · {text} the budget" if (text := budgets.mark(excess)) else "" for excess in line["over_budget"]]
    columns = [line["n_layer"], line["d_model"], line["loss"], spread, line["n"], lost, rate, line["params_total"], over]
    result.add_scatter(
        x=line["ratio"],
        y=line[y],
        error_y=bars,
        mode="lines+markers",
        name=arch,
        line={"color": palette.color(arch), "width": 2.2},
        marker={"symbol": palette.symbol(arch), "size": 9},
        customdata=np.column_stack(columns),
        hovertemplate=f"<b>{arch}</b> · ratio %{{x:.4g}} (%{{customdata[0]}} × %{{customdata[1]}})<br>loss %{{customdata[2]:.4f}}"
        + "%{customdata[3]}<br>"
        + ("difference %{y:+.4f}<br>" if y == "delta" else "")
        + "n = %{customdata[4]}%{customdata[5]} · %{customdata[6]}<br>%{customdata[7]:.3s} parameters%{customdata[8]}<extra></extra>",
    )


def _add_paper_line(result: go.Figure, arch: str, line: pd.DataFrame, *, ours: bool) -> None:
    """The paper's line of a design, stronger where there is one of our own to compare it with."""
    result.add_scatter(
        x=line["ratio"],
        y=line["delta"],
        mode="lines+markers",
        name=f"{arch}, paper 400M",
        line={"color": palette.color(arch), "width": 1.6 if ours else 1, "dash": "dash"},
        marker={"symbol": palette.symbol(arch) + "-open", "size": 7},
        opacity=0.9 if ours else 0.4,
        customdata=np.column_stack([line["n_layer"], line["loss"]]),
        hovertemplate=f"<b>{arch}, paper</b> (400M, FineWeb-Edu) · ratio %{{x:.4g}}, %{{customdata[0]:.0f}} layers"
        "<br>difference %{y:+.4f}<extra></extra>",
    )
