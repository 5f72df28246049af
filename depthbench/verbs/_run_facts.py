"""What `depthbench runs show` and `diff` say of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from depthbench.errors import UserError
from depthbench.figures.designs import option_text
from depthbench.store.reader import Store
from depthbench.store.removal import bytes_of
from depthbench.verbs._text import columns, counted, loss, named, size

# Columns that differ between any two runs, that are shown elsewhere, or that say how a run is kept and not what it is.
NOT_COMPARED = {"run_id", "created_at", "updated_at", "config", "schema_version", "attempt", "folder", "problem", "wall_s", "n_scalars"}


def facts_of(folder: Path) -> dict:
    """The run's row of ``Store.runs``, None for what is not known. Raises UserError where it cannot be read."""
    frame = Store(folder.parent).runs()
    rows = frame[frame["run_id"] == folder.name].to_dict("records")
    if not rows:
        raise UserError(f"{folder} holds no run: its row was never written; remove the folder")
    if rows[0]["status"] == "unreadable":
        raise UserError(rows[0]["problem"])
    return {name: None if pd.isna(value) else _whole(value) for name, value in rows[0].items()}


def show(folder: Path) -> list[str]:
    """Facts, attempts, what is stored, and the configuration, as lines."""
    facts, store = facts_of(folder), Store(folder.parent)
    parts = {
        "": named(summary(folder, facts)),
        "attempts": attempts(store.rows("attempts", [folder.name])),
        "stored": named(stored(store, folder.name)) or ["  nothing yet"],
        "checkpoints": checkpoints(folder),
        "configuration": named({name: _written(value) for name, value in configuration(facts).items()}) or ["  not recorded"],
    }
    return [folder.name, *(line for title, lines in parts.items() for line in ([f"\n{title}"] if title else []) + lines)]


def summary(folder: Path, run: dict) -> dict[str, str]:
    """The facts that a reader looks for first. What an old run did not record is left out."""

    def text(template: str, *names: str) -> str:
        return template.format(*(run[name] for name in names)) if all(run.get(name) is not None for name in names) else ""

    def together(*texts: str) -> str:
        return ", ".join(filter(None, texts))

    best = text(" (best {:.4f} at step {:,})", "val_loss_best", "val_loss_best_step")
    asked = text(" ({:g} asked for)", "ratio_requested") if run["ratio_requested"] != run["ratio"] else ""
    planned = f" of {run['tokens_planned'] // run['batch_tokens']:,}" if run["tokens_planned"] and run["batch_tokens"] else ""
    return {
        "folder": f"{folder}, {size(bytes_of(folder))}",
        "status": f"{run['status']}, {run['step'] or 0:,}{planned} steps",
        "problem": run["problem"] or "",
        "design": " ".join(filter(None, (run["arch"], option_text(run["options"])))),
        "shape": together(
            text("{} blocks x {}", "n_layer", "d_model"),
            text("{} heads of {}", "n_head", "head_dim"),
            text("d_ff {}", "d_ff"),
            text("vocabulary {:,}", "vocab_size"),
            text("ratio {:.2f}", "ratio") + asked,
        ),
        "parameters": together(text("{:,}", "params_total"), text("{:,} in the backbone", "params_backbone"), text("size {}", "size")),
        "training": together(
            text("{:,} tokens planned", "tokens_planned"),
            text("batch of {:,}", "batch_tokens"),
            text("length {:,}", "seq_len"),
            text("learning rate {:g}", "lr"),
            text("seed {}", "seed"),
            text("{}", "precision"),
        ),
        "loss": f"training {loss(run['train_loss'])}, validation {loss(run['val_loss'])}{best}",
        "corpus": together(text("{}", "corpus"), text("fingerprint {}", "corpus_fingerprint"), text("tokenizer {}", "tokenizer")),
        "made": together(
            text("{:%Y-%m-%d %H:%M} UTC", "created_at"),
            run["device"] or "",
            text("depthbench {}", "version"),
            text("commit {:.10}", "git_commit"),
        ),
    }


def attempts(rows: pd.DataFrame) -> list[str]:
    """A line for each attempt: from which step, from when to when, where."""

    def time(value) -> str:
        return "-" if pd.isna(value) else f"{value:%Y-%m-%d %H:%M:%S}"

    cells = [["  attempt", "from step", "started (UTC)", "ended", "host", "device"]]
    for row in rows.itertuples():
        start = "the start" if pd.isna(row.resumed_from_step) else f"{row.resumed_from_step:.0f}"
        cells.append([f"  {row.attempt}", start, time(row.started_at), time(row.ended_at), row.host or "", row.device or ""])
    return columns(cells)


def stored(store: Store, run_id: str) -> dict[str, str]:
    """What was recorded: scalars with their points, statistics of the layers with their steps, probes with their settings."""
    scalars = store.scalar_names([run_id])
    found = {"scalars": ", ".join(f"{row.name} {row.n:,}" for row in scalars.itertuples(index=False))}
    for (metric, n_steps, n_layer), rows in store.layer_stat_keys(run_id).groupby(["metric", "n_steps", "n_layer"]):
        extent = f"{counted(n_steps, 'step')} x {counted(n_layer, 'layer')}"
        sites = rows.groupby("site")["direction"].agg(" and ".join)
        found[f"layers' {metric}, {extent}"] = ", ".join(f"{site} {directions}" for site, directions in sites.items())
    for (step, probe), rows in store.probes([run_id]).groupby(["step", "probe"], dropna=False):
        found[f"probe {probe}, step {step:,.0f}"] = probe_settings(rows)
    for table in ("evals", "costs"):
        if n := len(store.rows(table, [run_id])):
            found[table] = counted(n, "row")
    return found


def probe_settings(rows: pd.DataFrame) -> str:
    """On what a probe was measured, and by which skip rules; or that it has no meaning for the design."""
    if (rows["status"] == "not_defined").all():
        return f"not defined: {rows['note'].iloc[0]}"
    windows = rows[["windows", "length"]].dropna().drop_duplicates()
    texts = [f"{windows:.0f} windows of {length:.0f} tokens" for windows, length in windows.itertuples(index=False)]
    rules = rows["rule"].dropna().unique()
    return "; ".join([*texts, *([f"skip rule {', '.join(rules)}"] if len(rules) else [])]) or counted(len(rows), "row")


def checkpoints(folder: Path) -> list[str]:
    """The checkpoint files and their sizes."""
    files = sorted((folder / "checkpoints").glob("*.ckpt"))  # by name: asking training.checkpoints would import Lightning
    return named({file.name: size(file.stat().st_size) for file in files}) or ["  none"]


def configuration(facts: dict) -> dict:
    """The recorded configuration, a dotted name for each value."""
    try:
        return flat(json.loads(facts["config"] or "{}"))
    except ValueError:
        return {}


def flat(node: dict, prefix: str = "") -> dict:
    """Nested dicts as one, the names joined by dots."""
    found = {}
    for name, value in node.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def diff(first: Path, second: Path) -> list[str]:
    """The facts and the configuration in which two runs differ, as lines; what both say twice is said once."""
    facts = [facts_of(folder) for folder in (first, second)]
    differences = {}
    for name in facts[0]:
        if name not in NOT_COMPARED and facts[0][name] != facts[1][name]:
            differences[name] = tuple(_written(run[name]) for run in facts)
    configured = [configuration(run) for run in facts]
    for name in dict.fromkeys([*configured[0], *configured[1]]):
        values = tuple(_written(run[name]) if name in run else "-" for run in configured)
        last = name.rpartition(".")[2]
        said = [pair for known, pair in differences.items() if known.rpartition(".")[2] == last]
        if values[0] != values[1] and values not in said:
            differences[name] = values
    lines = [f"a  {first.name}", f"b  {second.name}", ""]
    if not differences:
        return [*lines, "they differ in no fact and nothing of their configuration"]
    return lines + columns([["", "a", "b"], *([name, *values] for name, values in differences.items())])


def _whole(value):
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _written(value) -> str:
    """A value on one line, as a person would write it on a command line."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return " ".join(value.split())
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value, default=str)
