"""Headings, messages, figures and downloads that look the same on every page."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from depthbench.errors import UserError
from depthbench.figures import style
from parts import controls, data

MAX_PROBLEMS = 5
REFRESH = {"off": None, "2 s": 2, "5 s": 5, "15 s": 15}


@contextmanager
def guarded() -> Iterator[None]:
    """Show what a user can mend (an unreadable run, one of a newer version, a folder without rights) as one line, not a traceback."""
    try:
        yield
    except UserError as error:
        message = str(error)
    except PermissionError as error:
        message = f"{error.filename} cannot be read: {error.strerror}"
    else:
        return
    st.error(message, icon=":material/error:")
    st.stop()


def require_runs() -> pd.DataFrame:
    """The runs; or, where there are none, a page that says how to make one."""
    with guarded():
        frame = data.runs() if data.runs_dir().is_dir() else pd.DataFrame()
    if len(frame):
        return frame
    folder = data.runs_dir()
    missing = not folder.is_dir()
    what = f"The runs folder `{folder}` does not exist." if missing else f"There are no runs in `{folder}` yet."
    st.info(f"{what} Make one with the command below: it takes a few minutes on a CPU, and can be watched here while it trains.")
    option = "" if str(folder) == "runs" else f" --runs {shlex.quote(str(folder))}"
    st.code(f"depthbench fit --arch pre_ln --ratio 32{option}", language="bash")
    st.button("Look again", icon=":material/refresh:")
    st.stop()


def require_readable_runs() -> pd.DataFrame:
    """The runs of which there is more than a message; or, where there are none, the messages."""
    frame = require_runs()
    if len(good := data.readable(frame)):
        return good
    problems(frame)
    st.stop()


def problems(runs: pd.DataFrame) -> None:
    """What is wrong with runs, a line each."""
    lines = runs["problem"].dropna()
    for line in lines.head(MAX_PROBLEMS):
        st.warning(line, icon=":material/warning:")
    if len(lines) > MAX_PROBLEMS:
        st.caption(f"{len(lines) - MAX_PROBLEMS} more runs have problems.")


def chart(figure: go.Figure, key: str) -> None:
    """A figure over the full width."""
    st.plotly_chart(figure, key=key, width="stretch", config=style.CONFIG)


def note_and_csv(note: str, frame: pd.DataFrame, name: str) -> None:
    """A line below a table or figure: what to know about it, and a button that downloads exactly the rows of ``frame``."""
    with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
        st.caption(note, width="content")
        st.download_button(
            "CSV",
            frame.to_csv(index=False).encode(),
            file_name=f"depthbench-{name}.csv",
            mime="text/csv",
            icon=":material/download:",
            key=f"csv-{name}",
            on_click="ignore",
            help=f"What is shown, as a table of {len(frame):,} rows",
        )


def running(runs: pd.DataFrame) -> set[str]:
    """Ids of the runs that are training now."""
    return set(runs.loc[runs["status"] == "running", "run_id"])


def refresh_every(live: set[str]) -> int | None:
    """Seconds between updates, chosen in the sidebar; None (and no control) when nothing is running."""
    if not live:
        return None
    with st.sidebar:
        chosen = controls.one(
            st.segmented_control, "Live update", REFRESH, key="refresh", default="5 s", help=f"{len(live)} running: how often to look"
        )
    return REFRESH[chosen]


def redraw_when_ended(live: set[str]) -> None:
    """In a live panel: once one of the runs in ``live`` has ended, draw the whole page anew, controls and status included."""
    if live - running(data.runs()):
        st.rerun()
