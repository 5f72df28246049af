"""The one writer of a run folder: rows are buffered, and a thread of its own puts them on disk while training goes on."""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import pyarrow as pa

from depthbench.errors import UserError
from depthbench.store.disk import WRITE_ERRORS, remove_leftovers, write_error
from depthbench.store.folder import SEGMENTS, Segment, give_sign_of_life, is_run_folder, list_run, refuse_unwritable
from depthbench.store.lock import run_lock
from depthbench.store.queries import latest_run_row
from depthbench.store.reading import opened_by_writer
from depthbench.store.schema import SCHEMA_VERSION, STATUSES, TABLES, check_columns
from depthbench.store.seal import seal_run
from depthbench.store.segments import columnar, merge, merge_due, write_segment
from depthbench.store.sources import connect

HEARTBEAT_EVERY_S = 15.0


class RunWriter:
    """Records one run, or adds to a recorded one. On rank 0 only; holds the run's lock from the first moment to ``seal`` or ``close``.

    ``RunWriter(folder, run)`` begins attempt ``attempt``: it writes the run's row (``run``: columns of table ``run``; status running)
    and the attempt's before it returns. For an attempt after the first, ``resumed_from_step`` is the step its checkpoint was taken at:
    rows of earlier attempts beyond it no longer stand, and this attempt must not record that step again; None means that it began
    anew. ``RunWriter(folder)`` is for later writers (probe, eval, cost): it adds rows to the attempt that stands and leaves the run's
    row as it is.

    As a context manager it seals at the end: finished, interrupted (KeyboardInterrupt) or failed; a later writer leaves the status.

    Raises UserError where another process writes to the run, the folder cannot be written, or the sealed file there is is damaged; a
    damaged segment stays as it is. A write that fails later is raised as
    UserError by the next ``add``, ``flush``, ``drain``, ``update_run`` or ``seal``; the rows stay buffered, and the next flush tries
    again.
    """

    def __init__(
        self,
        folder: Path,
        run: dict | None = None,
        *,
        attempt: int = 1,
        resumed_from_step: int | None = None,
        flush_every_s: float = 5.0,
    ):
        self.folder = Path(folder)
        refuse_unwritable(self.folder)
        if self.folder.name.startswith("."):
            raise UserError(f"{self.folder} is hidden, and listings of runs leave it out: rename it")
        self._flush_every_s = flush_every_s
        self._condition = threading.Condition()
        self._buffers: dict[str, list[pa.Table]] = {}
        self._added = self._written = 0  # rows, to tell when those of one moment are on disk
        self._asked = self._closing = False
        self._error: Exception | None = None
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._process = os.getpid()
        if run is None and not is_run_folder(self.folder):
            raise UserError(f"{self.folder} holds no run to add to")
        with ExitStack() as stack:
            stack.enter_context(run_lock(self.folder))
            self._open_folder()
            self._begin(run, attempt, resumed_from_step)
            self._thread = threading.Thread(target=self._work, name=f"store {self.folder.name}", daemon=True)
            self._thread.start()
            stack.callback(self._stop)
            self.drain()
            self._held = stack.pop_all()
        atexit.register(self.close)

    # ---- what the caller's thread does

    def add(self, table: str, rows: Sequence[dict]) -> None:
        """Buffer ``rows`` (missing columns are null, ``attempt`` is filled in). Takes about 0.4 ms per 1,000 rows and waits for nothing.

        Raises ValueError for a column the table lacks, ValueError or TypeError for a value of the wrong type; nothing is buffered then.
        """
        if table in ("run", "attempts"):
            raise ValueError(f"table '{table}' is written by the writer itself; see update_run")
        if rows:
            self._buffer(table, rows)
        self._raise_error()

    def update_run(self, **columns) -> None:
        """Set columns of the run's row, e.g. ``device="cuda"``. The latest row is the one readers see."""
        self._set_run(columns)
        self._raise_error()

    def flush(self) -> None:
        """Have what is buffered written now rather than at the next interval. Returns at once."""
        with self._condition:
            self._asked = True
            self._condition.notify_all()
        self._raise_error()

    def drain(self) -> None:
        """Wait until every row added so far is on disk, where a kill cannot reach it."""
        with self._condition:
            wanted, self._error = self._added, None  # whatever failed before is tried again now
            self._asked = True
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._written >= wanted or self._error)
        self._raise_error()

    def seal(self, status: str | None = None) -> None:
        """End the attempt with ``status``, put everything into ``metrics.duckdb`` and close.

        ``status``: finished, failed, diverged or interrupted; None (a later writer) leaves the run's row as it is. Where the disk is
        full it raises UserError, and can be called again.
        """
        if self._closing:
            seal_run(self.folder)
            return
        if status is not None:
            if status not in STATUSES:
                raise ValueError(f"a run cannot end as '{status}' (known: {', '.join(STATUSES)})")
            self._attempt_row["ended_at"] = _now()
            self._buffer("attempts", [self._attempt_row])
            self._set_run({"status": status})
        self.drain()
        self._stop()
        try:
            seal_run(self.folder)
        finally:
            self.close()

    def close(self) -> None:
        """Put the buffered rows on disk and let the run go, unsealed. Does nothing on a closed writer, or in a forked child."""
        atexit.unregister(self.close)
        if os.getpid() != self._process:
            return
        with self._held:
            if not self._closing:
                self.drain()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, kind, *_) -> None:
        if self._closing:
            return
        status = "finished" if kind is None else "failed" if issubclass(kind, Exception) else "interrupted"
        with self._held:
            self.seal(status if self._run else None)

    # ---- opening

    def _open_folder(self) -> None:
        try:
            (self.folder / SEGMENTS).mkdir(exist_ok=True)
            give_sign_of_life(self.folder)
        except OSError as error:
            raise write_error(self.folder, error) from error
        remove_leftovers(self.folder / SEGMENTS)
        listing = list_run(self.folder)
        with opened_by_writer(listing) as snapshot:
            contained = snapshot.contained(listing)
            self._before, self._problem = latest_run_row(snapshot), snapshot.problem(listing, "cannot be added to")
        self._live = {table: listing.live(table, contained) for table in TABLES}
        names = contained | {segment.name for segment in listing.segments}
        self._number = max((segment.last for segment in map(Segment.parse, names) if segment), default=0)

    def _begin(self, run: dict | None, attempt: int, resumed_from_step: int | None) -> None:
        before = self._before or {}
        self._last_update = before.get("updated_at")
        self._run = None
        if run is None:
            if not before:
                raise UserError(self._problem or f"{self.folder} holds no row of a run: remove it")
            self._attempt = before["attempt"]
            return
        self._attempt = attempt
        self._attempt_row = {"resumed_from_step": resumed_from_step, "started_at": _now(), "host": socket.gethostname()}
        self._attempt_row |= {name: run.get(name) for name in ("device", "git_commit")}
        self._run = {"run_id": self.folder.name, "created_at": before.get("created_at") or _now()}
        self._buffer("attempts", [self._attempt_row])
        self._set_run({**run, "status": "running", "schema_version": SCHEMA_VERSION})

    # ---- rows in memory

    def _buffer(self, table: str, rows: Sequence[dict]) -> None:
        if self._closing:
            raise ValueError(f"the writer of {self.folder.name} is closed")
        columns = columnar(table, rows, self._attempt)
        with self._condition:
            self._buffers.setdefault(table, []).append(columns)
            self._added += len(rows)

    def _set_run(self, columns: dict) -> None:
        if self._run is None:
            raise ValueError("a later writer leaves the run's row as it is")
        check_columns("run", columns)
        now = _now()
        if self._last_update and now <= self._last_update:  # the clock was set back; the latest row must still be the latest
            now = self._last_update + timedelta(microseconds=1)
        self._last_update = now
        self._run |= {**columns, "updated_at": now}
        self._buffer("run", [self._run])

    def _raise_error(self) -> None:
        with self._condition:
            error, self._error = self._error, None
        if error:
            raise error

    # ---- what the writer's own thread does

    def _work(self) -> None:
        next_flush = next_beat = time.monotonic()
        while not self._closing or self._asked:
            with self._condition:
                wait_s = max(0.0, min(next_flush, next_beat) - time.monotonic())
                self._condition.wait_for(lambda: self._asked or self._closing, timeout=wait_s)
                asked, self._asked = self._asked, False
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + HEARTBEAT_EVERY_S
                with suppress(OSError):  # a folder that cannot be written is the flush's to report
                    give_sign_of_life(self.folder)
            if asked or now >= next_flush:
                self._write_out()
                next_flush = time.monotonic() + self._flush_every_s
        self._disconnect()

    def _stop(self) -> None:
        with self._condition:
            self._asked = self._closing = True
            self._condition.notify_all()
        self._thread.join()

    def _write_out(self) -> None:
        with self._condition:
            batch, self._buffers = self._buffers, {}
            through = self._added
        error = None
        try:
            self._write(batch)
        except WRITE_ERRORS as failure:
            error = write_error(self.folder, failure)
            error.__cause__ = failure
        except Exception as failure:  # raised where the caller sees it, not in a thread that nobody watches
            error = failure
        if error:
            self._disconnect()  # DuckDB may not go on with a connection that met a full disk
        with self._condition:
            for table, parts in batch.items():
                self._buffers[table] = parts + self._buffers.get(table, [])
            self._error = error
            if not error:
                self._written = through
            self._condition.notify_all()

    def _write(self, batch: dict[str, list[pa.Table]]) -> None:
        """Write each table of ``batch`` and take it out of it, so that what is left after an error is what is not on disk."""
        for table in [table for table in TABLES if table in batch]:
            self._number += 1
            segment = Segment(table, self._number, self._number)
            live = self._live[table]
            live.append(write_segment(self._duckdb(), self.folder, segment, batch[table]))
            del batch[table]
            if due := merge_due(live):
                self._live[table] = live[: -len(due)] + merge(self._duckdb(), self.folder, due)

    def _duckdb(self) -> duckdb.DuckDBPyConnection:
        if self._connection is None:
            self._connection = connect()
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection:
            connection.close()


def _now() -> datetime:
    return datetime.now(UTC).replace(tzinfo=None)
