"""Runs: which there are, how they stand, and how their loss falls."""

from __future__ import annotations

import hashlib

import pandas as pd
import streamlit as st
from parts import controls, data, view

from depthbench.figures import budgets, curves, designs, palette, scaling

PAGE = {"title": "Runs", "icon": ":material/show_chart:", "order": 10}

STATUSES = ["running", "finished", "interrupted", "stale", "failed", "diverged"]
HIDDEN_BY_DEFAULT = {"failed", "diverged"}
EARLY = "stopped early"
MAX_ROWS = 500
SHOWN_UNASKED = 6
LOSSES = {"training and validation loss": ["train/loss", "val/loss"], "train/loss": ["train/loss"], "val/loss": ["val/loss"]}
X_AXES = {"step": "step", "tokens": "tokens", "wall time": "wall_s"}
# At a window of 1280 pixels the columns up to the last loss fill the table exactly: no heading is cut.
COLUMNS = {
    "run_id": st.column_config.TextColumn("Run", width=289, pinned=True),
    "status": st.column_config.MultiselectColumn(
        "Status",
        width=105,
        options=[*palette.STATUS_COLORS, EARLY],
        color=[*palette.STATUS_COLORS.values(), palette.STATUS_COLORS["interrupted"]],
        help=f"{EARLY}: finished, but before its planned tokens, as --trainer.max_steps asks",
    ),
    "progress": st.column_config.ProgressColumn(
        "Tokens seen", width=105, min_value=0, max_value=100, format="%.0f %%", help="of the tokens planned"
    ),
    "steps": st.column_config.TextColumn("Steps", width=110, help="of the steps planned"),
    "val_loss_best": st.column_config.NumberColumn("Best val loss", width=88, format="%.4f", help="lowest validation loss, nats per token"),
    "val_loss": st.column_config.NumberColumn("Last val loss", width=88, format="%.4f", help="latest validation loss, nats per token"),
    "ratio": st.column_config.NumberColumn("Ratio", format="%.4g", help="aspect ratio d_model / n_layer"),
    "arch": st.column_config.TextColumn("Design"),
    "size": st.column_config.TextColumn("Size"),
    "budget": st.column_config.TextColumn("Budget"),
    "shape": st.column_config.TextColumn("Shape", help="layers × width"),
    "lr": st.column_config.NumberColumn("Peak LR", format="%.3g"),
    "seed": st.column_config.NumberColumn("Seed", format="%d"),
    "tokens_per_s": st.column_config.NumberColumn("Tokens/s", format="compact"),
    "params_total": st.column_config.NumberColumn("Parameters", format="compact"),
    "over_budget": st.column_config.TextColumn("Over budget", help="parameters beyond the budget and its tolerance"),
    "tokens_done": st.column_config.NumberColumn("Tokens", format="compact"),
    "tokens_planned": st.column_config.NumberColumn("Planned", format="compact", help="tokens"),
    "corpus": st.column_config.TextColumn("Corpus"),
    "device": st.column_config.TextColumn("Device"),
    "created_at": st.column_config.DatetimeColumn("Started (UTC)", format="YYYY-MM-DD HH:mm"),
}


def filter_controls(runs: pd.DataFrame) -> dict[str, list[str]]:
    """What the sidebar's filters ask for: column -> wanted texts (none: all), and "words" that the run id must contain."""
    with st.sidebar:
        st.subheader("Filter")
        words = controls.text("Run id contains", key="search", placeholder="any part of a run id", icon=":material/search:")
        # All of them, present or not: a run that changes from running to finished must not drop out of the choice.
        default = [s for s in STATUSES if s not in HIDDEN_BY_DEFAULT]
        wanted = {"status": controls.many(st.pills, "Status", STATUSES, key="status", default=default, selection_mode="multi")}
        for column, label in {"arch": "Design", "size": "Size", "ratio": "Ratio", "seed": "Seed"}.items():
            options = as_text(runs[column].dropna().sort_values()).unique()
            wanted[column] = controls.many(st.multiselect, label, options, key=f"{column}s", placeholder="all")
    return wanted | {"words": words.lower().split()}


def as_text(column: pd.Series) -> pd.Series:
    """Values as the filters write them; what is unknown is empty."""

    def written(value: object) -> str:
        if isinstance(value, str) or pd.isna(value):
            return value if isinstance(value, str) else ""
        return f"{value:.0f}" if float(value).is_integer() else f"{value:.4g}"

    return column.map(written)


def filtered(runs: pd.DataFrame, wanted: dict[str, list[str]]) -> pd.DataFrame:
    """The runs that the filters let through. A status that no filter lists (an unreadable run) is always shown."""
    keep = runs["status"].isin(wanted["status"]) | ~runs["status"].isin(STATUSES)
    for column in ("arch", "size", "ratio", "seed"):
        if wanted[column]:
            keep &= as_text(runs[column]).isin(wanted[column])
    for word in wanted["words"]:
        keep &= runs["run_id"].str.lower().str.contains(word, regex=False)
    return runs[keep]


def steps_of_plan(runs: pd.DataFrame) -> list[str]:
    """For each run "2 of 1,750"; empty where the plan is unknown."""
    planned = runs["tokens_planned"] / runs["batch_tokens"]
    return [f"{n:,.0f} of {of:,.0f}" if pd.notna(of) else "" for n, of in zip(runs["step"].fillna(0), planned, strict=True)]


def hidden_note(runs: pd.DataFrame, wanted: dict[str, list[str]]) -> str:
    """How many runs the choice of statuses alone hides, and which statuses they have."""
    every = filtered(runs, wanted | {"status": STATUSES})
    counts = every.loc[~every["status"].isin(wanted["status"]) & every["status"].isin(STATUSES), "status"].value_counts()
    return f" Hidden by status: {', '.join(f'{n} {status}' for status, n in counts.items())}." if len(counts) else ""


def table(runs: pd.DataFrame, hidden: str) -> list[str]:
    """The table; returns the run ids picked in it. ``hidden``: what the note below says of runs that are not in it."""
    shown = runs.head(MAX_ROWS)
    progress = (100 * shown["tokens_done"] / shown["tokens_planned"]).clip(0, 100)
    shape = [f"{n:.0f} × {d:.0f}" if pd.notna(n) and pd.notna(d) else "" for n, d in zip(shown["n_layer"], shown["d_model"], strict=True)]
    over = budgets.over_budget(shown).map(budgets.mark)
    status = shown["status"].mask(scaling.stopped_early(shown), EARLY)
    made = {"arch": designs.names(shown), "progress": progress, "steps": steps_of_plan(shown), "shape": shape}
    rows = shown.assign(**made, over_budget=over, status=status)[list(COLUMNS)]
    ids = list(shown["run_id"])
    # The widget knows rows, not runs: another list of runs is another widget, and starts from what was picked before.
    key = "table-" + hashlib.sha256("\n".join(ids).encode()).hexdigest()[:12]
    picked = [run for run in controls.kept("selected") if run in ids]
    state = st.dataframe(
        rows.assign(status=[[status] for status in rows["status"]]),  # a list of one: that is how a cell becomes a coloured label
        key=key,
        hide_index=True,
        column_config=COLUMNS,
        height=min(36 * (len(rows) + 1), 388),
        selection_mode="multi-row",
        selection_default={"selection": {"rows": [ids.index(run) for run in picked]}},
        on_select="rerun",
        placeholder="",
    )
    picked = [ids[row] for row in state["selection"]["rows"] if row < len(ids)]
    controls.keep("selected", picked)
    more = f" The first {MAX_ROWS} are listed: narrow the filters to see others." if len(runs) > MAX_ROWS else ""
    view.note_and_csv(f"Runs that pass the filters: {len(runs)}, ticked: {len(picked)}.{hidden}{more}", rows, "runs")
    return picked


def loss_curves(runs: pd.DataFrame, picked: list[str]) -> None:
    """The curves of the picked runs, or of the newest where none is picked."""
    chosen = runs[runs["run_id"].isin(picked)] if picked else runs[runs["n_scalars"].fillna(0) > 0].head(SHOWN_UNASKED)
    drawn = chosen.head(data.MAX_CURVES)
    if drawn.empty:
        st.info("No run passes the filters." if runs.empty else "Nothing recorded yet.")
        return
    with view.guarded():
        names = [n for n in data.scalar_names(list(drawn["run_id"])) if n not in ("train/loss", "val/loss")]
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
        scalar = controls.one(st.selectbox, "Curve", [*LOSSES, *names], key="curve", width=220)
        x = controls.one(st.segmented_control, "Against", X_AXES, key="x")
        smoothing = controls.one(st.select_slider, "Smoothing", [0, 0.5, 0.8, 0.9, 0.95, 0.98], key="smooth", width=140)
        log_x = controls.switch("log x", key="logx")
        log_y = controls.switch("log y", key="logy")
    with view.guarded():
        scalars = data.scalars(list(drawn["run_id"]), LOSSES.get(scalar, [scalar]))
    if scalars.empty:
        st.info("Nothing recorded yet for this curve.")
        return
    view.chart(curves.figure(scalars, drawn, x=X_AXES[x], log_x=log_x, log_y=log_y, smoothing=smoothing), key="curves")
    n_drawn, note = scalars["run_id"].nunique(), ""
    if picked and len(chosen) > n_drawn:
        first = "The first " if len(chosen) > len(drawn) and n_drawn == len(drawn) else ""
        note = f"{first}{n_drawn} of {len(chosen)} ticked runs are drawn."
    elif not picked and len(runs) > n_drawn:
        which = f"The newest {n_drawn}" if n_drawn == len(drawn) else f"{n_drawn} of the newest {len(drawn)}"
        note = f"{which} that recorded anything are drawn: tick rows of the table to choose."
    view.note_and_csv(note, curves.smooth(scalars, smoothing) if smoothing else scalars, "curves")


st.title("Runs")
everything = view.require_runs()
live = view.running(everything)
wanted = filter_controls(everything)


@st.fragment(run_every=view.refresh_every(live))
def panel() -> None:
    view.redraw_when_ended(live)
    everything = data.runs()
    runs = filtered(everything, wanted)
    picked = table(runs, hidden_note(everything, wanted))
    view.problems(runs)
    loss_curves(data.readable(runs), picked)


panel()
