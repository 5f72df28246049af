"""The dashboard's queries, one function per question.

Each is cached by the version of the data it reads, so a cached answer is never stale, and each cache is bounded. All reading goes
through depthbench.store.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pandas as pd
import streamlit as st

from depthbench.figures import layers
from depthbench.store.reader import Store

BUCKETS = 1000  # points per curve beyond which the store reduces to the mean, minimum and maximum of neighbours
MAX_STEPS = 4000  # steps of a layer statistic, likewise
MAX_CURVES = 12


def runs_dir() -> Path:
    """The runs folder: `--runs DIR` after `--` on the command line, else runs/."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--runs", default="runs")
    return Path(parser.parse_known_args(sys.argv[1:])[0].runs).expanduser()


@st.cache_resource(max_entries=4, show_spinner=False)
def _store(folder: str) -> Store:
    return Store(Path(folder))


def store() -> Store:
    """The one reader of the runs folder."""
    return _store(str(runs_dir().absolute()))


def runs() -> pd.DataFrame:
    """One row per run, newest first. Not cached here: the store reads only what changed, and whether a run is stale depends on the time."""
    return store().runs().sort_values("created_at", ascending=False, kind="stable", na_position="last", ignore_index=True)


def readable(runs: pd.DataFrame) -> pd.DataFrame:
    """Those of which there is more than a message."""
    return runs[runs["status"] != "unreadable"]


@st.cache_data(max_entries=64, ttl=600, show_spinner=False)
def _scalars(folder: str, run_id: str, version: str, names: tuple[str, ...]) -> pd.DataFrame:
    return _store(folder).scalars([run_id], list(names), buckets=BUCKETS)


def scalars(run_ids: list[str], names: list[str]) -> pd.DataFrame:
    """Scalars of several runs, at most BUCKETS points a curve. Cached run by run: while one is live, the others are not read again."""
    folder, wanted = str(runs_dir().absolute()), tuple(names)
    return pd.concat([_scalars(folder, run, store().version(run), wanted) for run in run_ids], ignore_index=True)


@st.cache_data(max_entries=16, ttl=600, show_spinner=False)
def _scalar_names(folder: str, run_ids: tuple[str, ...], versions: tuple[str, ...]) -> list[str]:
    return sorted(_store(folder).scalar_names(list(run_ids))["name"])


def scalar_names(run_ids: list[str]) -> list[str]:
    """Names of the scalars that any of the runs recorded."""
    return _scalar_names(str(runs_dir().absolute()), tuple(run_ids), tuple(store().version(run) for run in run_ids))


@st.cache_data(max_entries=16, ttl=600, show_spinner=False)
def _layer_stat_keys(folder: str, run_id: str, version: str) -> pd.DataFrame:
    return _store(folder).layer_stat_keys(run_id)


def layer_stat_keys(run_id: str) -> pd.DataFrame:
    """Which layer statistics a run recorded: metric, site, direction."""
    return _layer_stat_keys(str(runs_dir().absolute()), run_id, store().version(run_id))


@st.cache_data(max_entries=8, ttl=600, show_spinner=False)
def _layer_stats(folder: str, run_id: str, version: str, metric: str, site: str, direction: str) -> pd.DataFrame:
    stats = layers.extremes(_store(folder).layer_stats(run_id, metric, site, direction, buckets=MAX_STEPS))
    return layers.reduce_steps(stats[["step", "tokens", "layer", "value"]])


def layer_stats(run_id: str, metric: str, site: str, direction: str) -> pd.DataFrame:
    """One layer statistic of a run, reduced to what a heatmap shows: step, tokens, layer, value."""
    return _layer_stats(str(runs_dir().absolute()), run_id, store().version(run_id), metric, site, direction)
