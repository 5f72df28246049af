"""Layers: what each block does while the model trains."""

from __future__ import annotations

import pandas as pd
import streamlit as st
from parts import controls, data, view

from depthbench.figures import curves, layers

PAGE = {"title": "Layers", "icon": ":material/layers:", "order": 30}

LOOKED_THROUGH = 20  # newest runs that are asked for layer statistics, to open the page with something to see
NO_STATISTICS = "No layer statistics recorded yet: they are written at the first sampled step of a run."


def pick_runs(runs: pd.DataFrame) -> list[str]:
    """The runs to compare: those asked for, else those ticked on the Runs page, else the newest that has layer statistics."""
    ids = list(runs["run_id"])
    ticked = [run for run in controls.kept("selected") if run in ids][: layers.MAX_PANELS]
    default = ticked or [run for run in ids[:LOOKED_THROUGH] if len(data.layer_stat_keys(run))][:1] or ids[:1]
    chosen = controls.many(
        st.multiselect,
        "Runs",
        ids,
        key="run",
        default=default,
        pin=True,
        max_selections=layers.MAX_PANELS,
        help="Up to four, side by side.",
    )
    if not chosen:
        st.info("Choose a run.")
        st.stop()
    return chosen


def pick_statistic(keys: pd.DataFrame) -> tuple[str, str, str]:
    """Metric, site and direction, each among what the runs recorded."""
    chosen = []
    for box, column in zip(st.columns([3, 3, 2], vertical_alignment="bottom"), ["metric", "site", "direction"], strict=True):
        known = {"metric": layers.METRICS, "site": layers.SITES}.get(column, {"forward": "forward", "backward": "backward"})
        present = sorted(keys[column].unique(), key=lambda v, known=known: list(known).index(v) if v in known else len(known))
        widget = st.selectbox if column != "direction" else st.segmented_control
        with box:
            value = controls.one(
                widget, column.capitalize(), present, key=column, pin=True, format_func=lambda v, known=known: known.get(v, v)
            )
        keys = keys[keys[column] == value]
        chosen.append(value)
    return tuple(chosen)


def pick_step(steps: list[int]) -> int:
    """The step of the profile. A slider left at the end follows a live run."""
    if st.session_state.get("step") == st.session_state.get("_last_step"):
        st.session_state.pop("step", None)
    st.session_state["_last_step"] = steps[-1]
    if len(steps) == 1:
        return steps[0]
    return controls.one(st.select_slider, "Profile at step", steps, key="step", default=steps[-1])


def notes(panels: dict[str, pd.DataFrame]) -> str:
    """What the figures leave out."""
    without = [label for label in labels.values() if label not in panels]
    text = [f"Without this statistic: {', '.join(without)}."] if without else []
    if any(stats["step"].nunique() >= layers.MAX_STEPS for stats in panels.values()):
        text.append(f"Of the steps recorded {layers.MAX_STEPS} are drawn, the most unusual of each stretch.")
    return " ".join(text)


st.title("Layers")
runs = view.require_readable_runs()
with view.guarded():
    chosen = pick_runs(runs)
    keys = pd.concat([data.layer_stat_keys(run) for run in chosen]).drop_duplicates(["metric", "site", "direction"])
if keys.empty:
    st.info(NO_STATISTICS)
    st.stop()
statistic = pick_statistic(keys)
title = layers.title(*statistic)
by_id = runs.set_index("run_id").loc[chosen]
labels = curves.labels(by_id.reset_index())
depths = {labels[run]: int(by_id.loc[run, "n_layer"]) for run in chosen}
live = view.running(by_id.reset_index())


@st.fragment(run_every=view.refresh_every(live))
def panel() -> None:
    view.redraw_when_ended(live)
    with view.guarded():
        recorded = {labels[run]: data.layer_stats(run, *statistic) for run in chosen}
    panels = {label: stats for label, stats in recorded.items() if len(stats)}
    every = pd.concat(panels.values())
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        over = controls.one(st.segmented_control, "Over", ["step", "tokens"], key="over")
        log = controls.switch("log scale", key="log", disabled=not layers.can_log(every["value"]))
        relative = controls.switch("relative depth", key="relative", help="l / L, to lay models of different depths over one another.")
    log = log and layers.can_log(every["value"])
    heatmap_at = st.container()
    step = pick_step(sorted(int(s) for s in every["step"].unique()))
    profiles = {label: layers.at_step(stats, step) for label, stats in panels.items()}
    mark = {label: rows[over].iloc[0] for label, rows in profiles.items()}
    with heatmap_at:
        view.chart(layers.heatmap(panels, depths, name=title, x=over, log=log, relative=relative, mark=mark), key="heatmap")
    colors = {labels[run]: style["color"] for run, style in curves.styles(by_id.reset_index()).items()}
    view.chart(layers.profile(profiles, depths, colors, name=title, log=log, relative=relative), key="profile")
    everything = pd.concat(panels[labels[run]].assign(run_id=run) for run in chosen if labels[run] in panels)
    view.note_and_csv(notes(panels), everything, "layers")


panel()
