"""Sealing: everything a run folder holds, into one DuckDB file that any DuckDB since 1.1 opens."""

from __future__ import annotations

import os
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

import duckdb

from depthbench.errors import UserError
from depthbench.store.disk import WRITE_ERRORS, remove_leftovers, replacing, write_error
from depthbench.store.folder import HEARTBEAT, SEALED, SEGMENTS, Listing, Segment, list_run
from depthbench.store.lock import run_lock
from depthbench.store.queries import latest_run_row, run_summaries
from depthbench.store.reading import opened_by_writer, unreadable
from depthbench.store.schema import SEALED_ORDER, TABLES
from depthbench.store.sources import CONTAINED, connect, opened, quoted
from depthbench.store.summary import drop_other_summaries, keep_summary

# Set explicitly, or the file is readable only by the DuckDB release that wrote it and newer ones. Small blocks keep the file of a small
# run small (0.4 MB instead of 1.6 MB); DuckDB reads them since 1.1.
STORAGE_VERSION = "v1.0.0"
BLOCK_SIZE = 16384


def seal_run(folder: Path) -> str | None:
    """Write ``metrics.duckdb`` from the sealed file there is and the live segments, swap it in with one rename, remove the segments.

    Takes the run's lock. Rows of superseded attempts are left behind, only the latest row of ``run`` is kept. Killed before the rename,
    nothing has changed; killed after it, the file lists the segments that are left, so readers ignore them and the next seal removes
    them. Does nothing more than this clearing up where no rows are live.

    Damaged segments stay where they are, not listed, so that they count as soon as whole copies are put in their place: what is missing is
    returned, as in the run's ``problem``. Raises UserError where the disk is full, and where the sealed file is damaged; nothing has
    changed then.
    """
    with run_lock(folder):
        listing = list_run(folder)
        with opened_by_writer(listing) as snapshot:
            lost, problem = snapshot.lost(listing), snapshot.problem(listing)
            names = snapshot.contained(listing) | {segment.name for segment in listing.segments if segment not in lost}
            anything_new = any(snapshot.live(listing, table) for table in TABLES)
            if anything_new and latest_run_row(snapshot) is None:
                raise UserError(snapshot.problem(listing, "cannot be sealed") or f"{folder} holds no row of a run: remove it")
        try:
            if anything_new:
                with replacing(folder / SEALED) as temporary:
                    summary = _build(listing, temporary, names)
                    keep_summary(folder, os.stat(temporary), summary)
        except (*WRITE_ERRORS, duckdb.Error) as error:
            damaged = isinstance(error, duckdb.Error) and (not isinstance(error, WRITE_ERRORS) or "Corrupt" in str(error))
            raise (unreadable([folder], error) if damaged else write_error(folder, error)) from error
        _clear(listing, lost)
        return problem


def _build(listing: Listing, path: Path, names: set[str]) -> dict:
    remove_leftovers(path.parent, path.name)
    with connect() as connection, opened(connection, [listing]) as snapshot:
        options = f"STORAGE_VERSION {quoted(STORAGE_VERSION)}, BLOCK_SIZE {BLOCK_SIZE}"
        connection.execute(f"ATTACH {quoted(path)} AS sealing ({options})")
        connection.execute("BEGIN TRANSACTION")
        for table, order in SEALED_ORDER.items():
            rows = snapshot.query(f"SELECT {', '.join(TABLES[table])} FROM {table} ORDER BY {order}", table)
            connection.execute(f"CREATE TABLE sealing.{table} AS {rows}")
        connection.execute(f"CREATE TABLE sealing.{CONTAINED} AS SELECT unnest(?) AS name", [sorted(names)])
        connection.execute("COMMIT")
        connection.execute("CHECKPOINT sealing")
        connection.execute("DETACH sealing")
        return run_summaries(snapshot)[0]


def _clear(listing: Listing, lost: Container[Segment]) -> None:
    for segment in listing.segments:
        if segment not in lost:
            segment.path(listing.folder).unlink(missing_ok=True)
    drop_other_summaries(listing.folder)
    remove_leftovers(listing.folder)
    remove_leftovers(listing.folder / SEGMENTS)
    with suppress(OSError):  # a damaged segment, or a stranger's file, keeps the folder there
        (listing.folder / SEGMENTS).rmdir()
    with suppress(OSError):  # the run's status says that it has ended
        (listing.folder / HEARTBEAT).unlink()
