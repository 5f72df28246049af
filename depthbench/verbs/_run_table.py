"""The table of `depthbench runs list`, its filters and its JSON."""

from __future__ import annotations

import json
import math
from argparse import ArgumentParser, Namespace

import pandas as pd

from depthbench.errors import UserError, unknown
from depthbench.figures import designs
from depthbench.figures.scaling import stopped_early
from depthbench.store.queries import RUNS_COLUMNS
from depthbench.store.schema import STATUSES
from depthbench.verbs._text import columns, loss

FILTER_STATUSES = (*STATUSES, "stale", "unreadable")
FILTERS = ("status", "arch", "size")
HEADINGS = ("run", "design", "shape", "status", "steps", "done", "train loss", "val loss", "best")
NUMBERS = frozenset(range(4, len(HEADINGS)))


def add_filters(parser: ArgumentParser) -> None:
    parser.add_argument("--status", metavar="NAME[,NAME]", help=f"of these statuses alone: {', '.join(FILTER_STATUSES)}")
    parser.add_argument("--arch", metavar="NAME[,NAME]", help="of these designs alone, whatever their options")
    parser.add_argument("--size", metavar="NAME[,NAME]", help="of these sizes alone")


def filtered(runs: pd.DataFrame, args: Namespace) -> pd.DataFrame:
    """The rows of ``runs`` that the filters let through. Raises UserError for a status that there is not, or a value that no run has."""
    if args.options:
        raise UserError(f"--arch.{next(iter(args.options))}: runs are filtered by design, not by its options; use --arch alone")
    keep = pd.Series(True, index=runs.index)
    for column in FILTERS:
        asked = [name.strip() for name in (getattr(args, column) or "").split(",") if name.strip()]
        if not asked:
            continue
        check(column, asked, runs)
        keep &= runs[column].isin(asked)
    return runs[keep]


def check(column: str, asked: list[str], runs: pd.DataFrame) -> None:
    """Raise UserError for a misspelt filter, which would otherwise quietly find nothing."""
    there = sorted(runs[column].dropna().unique())
    for name in asked:
        if column == "status" and name not in FILTER_STATUSES:
            raise unknown("status", name, FILTER_STATUSES)
        if column != "status" and there and name not in there:
            raise UserError(f"no run has --{column} {name}; there are {', '.join(there)}")


def table(runs: pd.DataFrame) -> list[str]:
    """A line for each run under a line of headings."""
    status = runs["status"].mask(stopped_early(runs), "stopped early")  # finished, but before its planned tokens
    shown = runs.assign(status=status, design=designs.names(runs))
    return columns([HEADINGS, *(cells(row) for row in shown.to_dict("records"))], right=NUMBERS)


def cells(row: dict) -> list[str]:
    """The cells of one run; a dash for what is not known, as of one that cannot be read."""
    shape = f"{row['n_layer']:.0f} x {row['d_model']:.0f}" if pd.notna(row["n_layer"]) and pd.notna(row["d_model"]) else "-"
    step, steps = row["step"], row["tokens_planned"] / row["batch_tokens"]
    of = f"{0 if pd.isna(step) else step:,.0f}/{steps:,.0f}" if pd.notna(steps) else "-"
    share = row["tokens_done"] / row["tokens_planned"]
    done = f"{min(100, math.floor(100 * share))} %" if pd.notna(share) else "-"
    losses = [loss(row[name]) for name in ("train_loss", "val_loss", "val_loss_best")]
    return [row["run_id"], row["design"] or "-", shape, row["status"], of, done, *losses]


def as_json(row: dict) -> dict:
    """A row of ``Store.runs`` as JSON has it: null for NaN, infinity and what is not known; the configuration is `runs show`'s."""
    found = {}
    for name, value in row.items():
        if name == "config":
            continue
        if pd.isna(value) or (isinstance(value, float) and math.isinf(value)):
            value = None
        elif isinstance(value, pd.Timestamp):
            value = value.isoformat()
        elif not isinstance(value, str):
            value = int(value) if RUNS_COLUMNS[name] == "BIGINT" else float(value)
        found[name] = json.loads(value) if name == "options" and value else value
    return found
