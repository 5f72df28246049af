"""The one query layer over the runs below a folder, live ones included."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

from depthbench.errors import UserError
from depthbench.store import queries
from depthbench.store.folder import heartbeat_at, is_run_folder, is_silent, list_run, run_folders, version_of
from depthbench.store.reading import Reading
from depthbench.store.runs import unknown_run
from depthbench.store.schema import TABLES, check_columns
from depthbench.store.summary import kept_summary

_ALL = 2**62  # more buckets than there are points: each is returned as it was recorded


class Store:
    """The runs below one folder. Every method that returns rows returns a pandas DataFrame, in a defined order.

    Files are open only while a query runs, and writers never wait for one. May be shared by threads. A run goes by the name of its
    folder, which is its run id. A method that is given run ids raises UserError for one it does not know; an unreadable run (its
    sealed file is damaged, or a newer depthbench wrote it) raises UserError where it is the only one asked for, and is left out among
    several: ``runs`` says why. Of a run with damaged segments the rest is read, and ``runs`` names them.
    """

    def __init__(self, runs_dir: Path | str):
        self.runs_dir = Path(runs_dir)
        self._reading = Reading()
        self._summaries: dict[Path, tuple[str, dict]] = {}

    # ---- which runs

    def runs(self) -> pd.DataFrame:
        """One row per run, oldest first. The columns of table ``run``, and after them:

        - ``step``, ``tokens_done``, ``wall_s``: the furthest recorded; ``train_loss``, ``val_loss``, ``tokens_per_s``: the last
          recorded, NaN where that is NaN;
        - ``val_loss_best`` and ``val_loss_best_step``: over the ``n_val_loss_finite`` finite ones of ``n_val_loss``;
        - ``n_scalars`` (rows), ``n_attempts``, ``folder`` (a path, as text), ``problem``.

        ``status`` is one of schema.STATUSES, or ``stale`` (running, without a sign of life for two minutes), or ``unreadable``: then
        ``problem`` says why in one line, and only ``run_id`` and ``folder`` are filled besides. A ``problem`` of any other run names the
        damaged segments whose rows are left out, of every query. ``updated_at`` is the latest row or sign
        of life. Times are in UTC, without a zone. Only what changed since the last call is read again.
        """
        listings = {folder: list_run(folder) for folder in run_folders(self.runs_dir)}
        versions = {folder: version_of(listing) for folder, listing in listings.items()}
        summaries = {folder: known for folder, known in self._summaries.items() if versions.get(folder) == known[0]}
        for folder in listings.keys() - summaries.keys():
            if kept := kept_summary(listings[folder]):
                summaries[folder] = (versions[folder], kept)
        answers, problems = self._reading.ask_all([folder for folder in listings if folder not in summaries], queries.listed_runs)
        for summary in [summary for answer in answers for summary in answer]:
            folder = self.runs_dir / summary["run_id"]
            summaries[folder] = (versions[folder], summary)
        for folder, problem in problems.items():
            summaries[folder] = (versions[folder], {"run_id": folder.name, "status": "unreadable", "problem": str(problem)})
        self._summaries = summaries
        return _runs_frame([_as_of_now(folder, summary) for folder, (_, summary) in summaries.items()])

    def version(self, run_id: str | None = None) -> str:
        """A short text that differs whenever an answer about the run (about any run) may differ. For cache keys; opens no file."""
        if run_id is not None:
            return version_of(list_run(self.folder(run_id)))
        versions = [(folder.name, version_of(list_run(folder))) for folder in run_folders(self.runs_dir)]
        return hashlib.blake2b(repr(versions).encode(), digest_size=8).hexdigest()

    def folder(self, run_id: str) -> Path:
        """The run's folder."""
        folder = self.runs_dir / run_id
        if not run_id or not is_run_folder(folder):
            raise unknown_run(self.runs_dir, run_id)
        return folder

    # ---- scalars

    def scalar_names(self, run_ids: Sequence[str]) -> pd.DataFrame:
        """Every scalar recorded in any of the runs: ``name``, ``n_runs``, ``n``, ``n_finite``."""
        return self._frame(run_ids, "scalars", queries.SCALAR_NAMES).groupby("name", as_index=False).sum()

    def scalars(self, run_ids: Sequence[str], names: Sequence[str], *, buckets: int | None = None) -> pd.DataFrame:
        """The curves of ``names``, by run, name and step: ``run_id``, ``name``, ``step``, ``tokens``, ``wall_s``, ``value``,
        ``value_min``, ``value_max``, ``n``, ``n_finite``.

        Without ``buckets`` each recorded point is a row, its ``value`` as recorded (NaN and infinity too). With it a curve has at most
        so many rows: one stands for ``n`` neighbouring points up to its ``step``, with the mean and the extremes of the ``n_finite``
        finite ones, so that a spike of one step is still seen.
        """
        return self._frame(run_ids, "scalars", queries.SCALARS, {"names": list(names), "buckets": buckets or _ALL})

    # ---- statistics of the layers

    def layer_stat_keys(self, run_id: str) -> pd.DataFrame:
        """The statistics there are: ``metric``, ``site``, ``direction``, ``n``, ``n_finite``, ``n_steps``, ``n_layer``."""
        return self._frame([run_id], "layer_stats", queries.LAYER_STAT_KEYS)

    def layer_steps(self, run_id: str) -> pd.DataFrame:
        """The steps at which statistics of the layers were recorded: ``step``, ``tokens``."""
        return self._frame([run_id], "layer_stats", queries.LAYER_STEPS)

    def layer_stats(self, run_id: str, metric: str, site: str, direction: str, *, buckets: int | None = None) -> pd.DataFrame:
        """One statistic over steps and layers, by step and layer: ``step``, ``tokens``, ``layer`` (0-based block), ``value``,
        ``value_min``, ``value_max``, ``n``, ``n_finite``. ``buckets``: at most so many steps, reduced as in ``scalars``."""
        chosen = {"metric": metric, "site": site, "direction": direction, "buckets": buckets or _ALL}
        return self._frame([run_id], "layer_stats", queries.LAYER_STATS, chosen)

    # ---- probes

    def probes(self, run_ids: Sequence[str], probes: Sequence[str] | None = None) -> pd.DataFrame:
        """What the layer probes gave, by run, step, probe, rule, metric, i and j: ``run_id`` and the columns of table ``probes``.

        Every row of a measurement has its ``measured_at`` (UTC) and what it was taken on: ``windows`` held-out windows of ``length``
        tokens. Of a probe that was repeated at a step, by the same skip rule, only the latest measurement is returned. ``probes``: these
        alone. A probe that has no meaning for the run's design is one row of status ``not_defined``, its ``note`` the reason.
        """
        return self._frame(run_ids, "probes", queries.PROBES, {"probes": None if probes is None else list(probes)})

    # ---- any table

    def rows(self, table: str, run_ids: Sequence[str]) -> pd.DataFrame:
        """All standing rows of a table of schema.py, as recorded: ``run_id`` and the table's columns, by run and step."""
        check_columns(table, [])
        columns = ", ".join(name for name in TABLES[table] if name != "run_id")
        order = "step" if "step" in TABLES[table] else "attempt"
        return self._frame(run_ids, table, f"SELECT run_id, {columns} FROM {table} ORDER BY run_id, {order}")

    def _frame(self, run_ids: Sequence[str], table: str, select: str, parameters: dict | None = None) -> pd.DataFrame:
        folders = [self.folder(run_id) for run_id in dict.fromkeys(run_ids)]
        frames, problems = self._reading.ask_all(folders, lambda snapshot: snapshot.execute(select, table, parameters).df())
        if not frames or len(folders) == len(problems) == 1:
            raise next(iter(problems.values()))
        frame = pd.concat(frames, ignore_index=True)
        nullable = [name for name, kind in frame.dtypes.items() if isinstance(kind, pd.Int64Dtype)]
        return frame.astype(dict.fromkeys(nullable, "float64"))


def read_run(folder: Path | str) -> dict:
    """The run's row of one run folder: columns of table ``run`` as Python values, None for null, ``config`` as JSON text.

    ``status`` may be ``stale``, as in ``Store.runs``. Raises UserError where the folder holds no run, or an unreadable one.
    """
    folder = Path(folder)
    row, problem = Reading().ask([folder], lambda snapshot: (queries.latest_run_row(snapshot), snapshot.problem(*snapshot.listings)))
    if row is None:
        raise UserError(problem or f"{folder} holds no run")
    return {**row, "status": _status(folder, row["status"])}


def _status(folder: Path, recorded: str) -> str:
    return "stale" if recorded == "running" and is_silent(folder) else recorded


def _as_of_now(folder: Path, summary: dict) -> dict:
    summary = {**summary, "folder": str(folder), "status": _status(folder, summary["status"])}
    beat, row = heartbeat_at(folder), summary.get("updated_at")
    if beat and row:
        summary["updated_at"] = max(row, datetime.fromtimestamp(beat, UTC).replace(tzinfo=None))
    return summary


def _runs_frame(summaries: list[dict]) -> pd.DataFrame:
    types = {**queries.RUNS_COLUMNS, "folder": "VARCHAR", "problem": "VARCHAR"}
    frame = pd.DataFrame(summaries, columns=list(types))
    for name, sql_type in types.items():
        if sql_type == "TIMESTAMP":
            frame[name] = pd.to_datetime(frame[name])
        elif sql_type == "VARCHAR":
            frame[name] = frame[name].astype(object).where(frame[name].notna(), None)
        else:
            frame[name] = pd.to_numeric(frame[name])
    return frame.sort_values(["created_at", "run_id"], ignore_index=True)
