"""Scaling: does a design gain from depth at a fixed parameter budget?"""

from __future__ import annotations

import math

import pandas as pd
import streamlit as st
from parts import controls, data, suggest, view

from depthbench.errors import UserError
from depthbench.figures import scaling
from depthbench.shapes import size_named

PAGE = {"title": "Scaling", "icon": ":material/straighten:", "order": 20}

VIEWS = {"loss": "loss", "difference from base": "delta", "difference and paper": "paper"}
ABOUT_VIEWS = """The base shape of each line is where its difference is 0. The paper's figure 2 (400M, FineWeb-Edu) is only shown as
differences from its own base shape (ratio 42.67): losses of another size and corpus do not compare with yours, slopes may."""
BEST_LR = "best per point"
COLUMNS = {
    "arch": "Design",
    "n_layer": "Layers",
    "d_model": "Width",
    "ratio": st.column_config.NumberColumn("Ratio", format="%.4g"),
    "params_total": st.column_config.NumberColumn("Parameters", format="compact"),
    "over_budget": st.column_config.NumberColumn("Over budget", format="percent", help="parameters beyond the budget's tolerance"),
    "lr": st.column_config.NumberColumn("Peak LR", format="%.3g"),
    "loss": st.column_config.NumberColumn("Val loss", format="%.4f", help="mean over seeds, nats per token"),
    "sd": st.column_config.NumberColumn("Std. dev.", format="%.4f", help="over seeds"),
    "n": st.column_config.NumberColumn("n", help="seeds in the mean"),
    "n_runs": st.column_config.NumberColumn("Seeds run"),
    "n_lr": st.column_config.NumberColumn("LRs tried"),
    "seeds": "Seeds",
    "runs": "Runs",
    "delta": st.column_config.NumberColumn("Difference", format="%+.4f", help="from the design's base shape"),
}


def one_setting(runs: pd.DataFrame) -> pd.DataFrame:
    """Choose size, budget, corpus and recipe, each among what the choices before it left; returns the runs of that one setting."""
    for box, column, label in zip(
        st.columns([2, 2, 3, 4]), ["size", "budget", "corpus", "recipe"], ["Size", "Budget", "Corpus", "Recipe"], strict=True
    ):
        values = scaling.recipes(runs) if column == "recipe" else runs[column].fillna("unknown")
        most_first = list(values.value_counts().index)
        with box:
            chosen = controls.one(st.selectbox, label, most_first, key=column, pin=True, format_func=short)
        runs = runs[values == chosen]
    return runs


def short(value: str) -> str:
    """A corpus that is a folder is called by the folder's name."""
    return value.rstrip("/").rsplit("/", 1)[-1]


def notes(runs: pd.DataFrame, points: pd.DataFrame, without_base: list[str]) -> str:
    """What the figure leaves out or summarises, in a sentence each."""
    text = []
    if points["arch"].value_counts().max() == 1:
        drawn = runs["run_id"].isin(points["runs"].iloc[0].split(", "))
        if command := suggest.another_shape(runs[drawn].iloc[0], data.runs_dir()):
            text.append(f"A line needs more shapes: `{command}` adds one.")
    if (points["n"] > 1).any():
        text.append("Bars are ± 1 standard deviation over seeds.")
    if left_out := incomplete(runs):
        text.append(left_out)
    lost = int((points["n_runs"] - points["n"]).sum())
    if lost:
        text.append(f"{lost} runs without a finite validation loss are left out of the means.")
    if without_base:
        text.append(f"Not drawn, for want of a base shape near this ratio: {', '.join(without_base)}.")
    return " ".join(text)


def incomplete(runs: pd.DataFrame) -> str:
    """How many runs are no points because they did not train all their tokens; empty where there are none."""
    early = int(scaling.stopped_early(runs).sum())
    unfinished = int((~scaling.complete(runs)).sum()) - early
    counts = [f"{n} {how}" for n, how in ((early, "stopped early"), (unfinished, "not finished")) if n]
    return f"Only runs that trained all planned tokens are drawn: {' and '.join(counts)}." if counts else ""


def base_ratio(size: str, ratios: list[float]) -> float:
    """Of ``ratios`` the one nearest, in log distance, to the ratio of the size's base shape."""
    try:
        base = size_named(size).ratio
    except UserError:
        base = scaling.paper_base_ratio()
    return min(ratios, key=lambda ratio: abs(math.log(ratio / base)))


st.title("Scaling")
runs = one_setting(view.require_readable_runs())
boxes = st.columns(4, vertical_alignment="bottom")
with boxes[0]:
    loss = controls.one(st.segmented_control, "Validation loss", scaling.LOSSES, key="loss")
with boxes[1]:
    rates = [BEST_LR, *sorted(runs["lr"].dropna().unique())]
    lr = controls.one(st.selectbox, "Peak learning rate", rates, key="lr", format_func=lambda v: v if v == BEST_LR else f"{v:g}")
with boxes[2]:
    kind = VIEWS[controls.one(st.selectbox, "Show", VIEWS, key="view", help=ABOUT_VIEWS)]

points = scaling.points(runs[scaling.complete(runs)], loss=loss, lr=None if lr == BEST_LR else lr)
if points.empty:
    st.info(incomplete(runs) or "No run of this choice has a finite validation loss yet.")
    st.stop()
shown, paper = points, None
if kind != "loss":
    ratios = sorted(points["ratio"].unique())
    with boxes[3]:
        nearest = base_ratio(runs["size"].iloc[0], ratios)
        base = controls.one(
            st.selectbox, "Base shape: ratio", ratios, key="base", default=nearest, pin=True, format_func=lambda r: f"{r:.4g}"
        )
    shown = scaling.deltas(points, base)
if kind == "paper":
    paper = scaling.deltas(scaling.paper_points(), scaling.paper_base_ratio())

view.chart(scaling.figure(shown, paper=paper, loss=loss), key="scaling")
everything = shown if paper is None else pd.concat([shown.assign(source="runs"), paper.assign(source="paper, 400M total")])
without_base = sorted(set(points["arch"]) - set(shown["arch"]))
view.note_and_csv(notes(runs, shown, without_base), everything, "scaling")
st.dataframe(shown, hide_index=True, column_config=COLUMNS, placeholder="")
