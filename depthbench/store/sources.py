"""Rows of many run folders as one relation per table: sealed files and live segments, each row once, superseded ones left out.

A ``Snapshot`` is taken from listings (folder.py), lives on one connection for one query or a few, and lets go of every file when it
closes. It is the only place that knows where rows lie; queries.py asks it by table name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb

from depthbench.errors import UserError
from depthbench.store.damage import damaged_segments
from depthbench.store.folder import SEGMENTS, Listing, Segment
from depthbench.store.schema import MEASURED, SCHEMA_VERSION, TABLES

# A table of every sealed file besides those of schema.py: the names of the segments it contains (and of those they contained).
CONTAINED = "segments"


def connect(threads: int = 1) -> duckdb.DuckDBPyConnection:
    """A DuckDB of its own in memory. It reaches for no network, and caches no files beyond what the system does."""
    config = {"threads": threads, "autoinstall_known_extensions": False, "enable_external_file_cache": False}
    return duckdb.connect(":memory:", config=config)


def quoted(text: str | os.PathLike) -> str:
    """An SQL string literal."""
    return "'" + str(text).replace("'", "''") + "'"


def parquet_rows(paths: Iterable[Path]) -> str:
    """SQL of the rows of these files, whatever their folders are called (DuckDB reads patterns and ``key=value`` parts in a path)."""
    literal = ", ".join(quoted(re.sub(r"([*?[])", r"[\1]", str(path))) for path in paths)
    return f"read_parquet([{literal}], union_by_name = true, hive_partitioning = false)"


class Snapshot:
    """The rows of some runs, as their listings found them, but for those of damaged segments. Use ``opened``."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, listings: Iterable[Listing]):
        self.connection = connection
        self.listings = list(listings)
        self._alias: dict[Listing, str] = {}
        self._live: dict[Listing, dict[str, list[Segment]]] = {}
        self._lost: dict[Listing, dict[Segment, str]] = {}
        self._tables: set[tuple[str, str]] = set()

    def attach(self, check_again: bool = False) -> None:
        for number, listing in enumerate(self.listings):
            if listing.sealed:
                alias = f"sealed_{number}"
                self.connection.execute(f"ATTACH {quoted(listing.sealed_path)} AS {alias} (READ_ONLY)")
                self._alias[listing] = alias
        if self._alias:
            self._tables = set(self.connection.execute("SELECT database_name, table_name FROM duckdb_tables()").fetchall())
        for listing in self.listings:
            if listing.segments:
                self._find_live(listing, damaged_segments(listing, again=check_again))
        self._refuse_newer()
        self._refuse_unknown_attempts()

    def contained(self, listing: Listing) -> set[str]:
        """The segments that the run's sealed file contains, by name: their files, where still there, hold nothing new."""
        alias = self._alias.get(listing)
        return {name for (name,) in self.connection.execute(f"SELECT name FROM {alias}.{CONTAINED}").fetchall()} if alias else set()

    def _find_live(self, listing: Listing, damaged: dict[Segment, str]) -> None:
        contained = self.contained(listing)
        live = {table: listing.live(table, contained, damaged) for table in TABLES}

        def is_elsewhere(segment: Segment) -> bool:
            merged = live.get(segment.table, ())
            return segment.name in contained or any(part.first <= segment.first and segment.last <= part.last for part in merged)

        self._live[listing] = live
        self._lost[listing] = {segment: why for segment, why in damaged.items() if not is_elsewhere(segment)}

    def live(self, listing: Listing, table: str) -> list[Segment]:
        """The whole segments of ``table`` whose rows no other file holds, oldest first."""
        return self._live.get(listing, {}).get(table, [])

    def lost(self, listing: Listing) -> dict[Segment, str]:
        """The damaged segments whose rows no other file holds, each with what is wrong."""
        return self._lost.get(listing, {})

    def problem(self, listing: Listing, state: str = "is read") -> str | None:
        """What is missing of the run and how to mend it, in one line; None where nothing is."""
        lost = self.lost(listing)
        if not lost:
            return None
        segment, why = next(iter(lost.items()))
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        return (
            f"run {listing.run_id} {state} without {SEGMENTS}/{segment.name}{more}, which is damaged ({why}): "
            f"put a whole copy in its place, or delete it to do without its rows; in {listing.folder}"
        )

    def detach(self) -> None:
        for alias in self._alias.values():
            self.connection.execute(f"DETACH {alias}")

    def _refuse_newer(self) -> None:
        newest = f"SELECT run_id, max(schema_version) AS version FROM ({self.relation('run')}) GROUP BY run_id"
        for run_id, version in self.connection.execute(f"SELECT * FROM ({newest}) WHERE version > {SCHEMA_VERSION}").fetchall():
            raise UserError(
                f"run {run_id} was written by a newer depthbench (schema {version}; this one reads up to {SCHEMA_VERSION}): "
                "update depthbench to read it"
            )

    def _refuse_unknown_attempts(self) -> None:
        """Where a row of attempts is lost of a run that has more than one, superseded rows would stand again."""
        for listing in self.listings:
            if all(segment.table != "attempts" for segment in self.lost(listing)):
                continue
            of_run = f"WHERE run_id = {quoted(listing.run_id)}"
            (newest,) = self.connection.execute(f"SELECT max(attempt) FROM ({self.relation('run')}) {of_run}").fetchone()
            found = self.connection.execute(f"SELECT attempt FROM ({self.relation('attempts')}) {of_run}").fetchall()
            if newest is None or newest > 1 and not {number for (number,) in found}.issuperset(range(1, newest + 1)):
                raise UserError(self.problem(listing, "cannot be read"))

    def relation(self, table: str) -> str:
        """SQL of all rows of ``table``, superseded ones included, with a ``run_id``: the folder's name. Missing columns are null."""
        typed = ", ".join(f"NULL::{sql_type} AS {name}" for name, sql_type in TABLES[table].items())
        is_run = table == "run"
        arms = [f"SELECT {'' if is_run else 'NULL::VARCHAR AS run_id, '}{typed} WHERE false"]
        for listing in self.listings:
            name = quoted(listing.run_id)
            columns = f"* REPLACE ({name} AS run_id)" if is_run else f"{name} AS run_id, *"
            arms += [f"SELECT {columns} FROM {place}" for place in self._places(listing, table)]
        return " UNION ALL BY NAME ".join(arms)

    def _places(self, listing: Listing, table: str) -> Iterator[str]:
        alias = self._alias.get(listing)
        if alias and (alias, table) in self._tables:
            yield f"{alias}.{table}"
        if live := self.live(listing, table):
            yield parquet_rows(segment.path(listing.folder) for segment in live)

    def query(self, select: str, table: str | None = None) -> str:
        """``select`` over the views run (one row per run, its latest), attempts (one row per attempt) and ``table`` (rows that stand).

        A row stands unless a later attempt resumed from a step before it; an attempt that resumed from no step began anew, and
        nothing of the earlier ones stands. Rows without a step (costs) always stand. Of what was measured more than once the rows of
        the latest measurement stand (``schema.MEASURED``).
        """
        merged = ", ".join(f"max({name}) AS {name}" for name in TABLES["attempts"] if name != "attempt")
        views = {
            "run": f"SELECT * FROM ({self.relation('run')}) QUALIFY row_number() OVER (PARTITION BY run_id ORDER BY updated_at DESC) = 1",
            "attempts": f"SELECT run_id, attempt, {merged} FROM ({self.relation('attempts')}) GROUP BY run_id, attempt",
            "standing": """
                SELECT earlier.run_id, earlier.attempt, min(coalesce(later.resumed_from_step, -1)) AS last_step
                FROM attempts AS earlier JOIN attempts AS later ON later.run_id = earlier.run_id AND later.attempt > earlier.attempt
                GROUP BY earlier.run_id, earlier.attempt""",
        }
        if table not in (None, "run", "attempts"):
            views[table] = self._standing_rows(table)
        return f"WITH {', '.join(f'{name} AS ({sql})' for name, sql in views.items())} {select}"

    def execute(self, select: str, table: str | None = None, parameters: dict | None = None) -> duckdb.DuckDBPyConnection:
        """Run ``query(select, table)``: fetch the result from what it returns."""
        return self.connection.execute(self.query(select, table), parameters)

    def _standing_rows(self, table: str) -> str:
        if "step" not in TABLES[table]:
            return self.relation(table)
        standing = f"""
            SELECT rows.* FROM ({self.relation(table)}) AS rows LEFT JOIN standing USING (run_id, attempt)
            WHERE (standing.last_step IS NULL OR rows.step IS NULL OR rows.step <= standing.last_step)"""
        if table not in MEASURED:
            return standing
        same = ", ".join(("run_id", *MEASURED[table]))
        return f"{standing} QUALIFY measured_at IS NOT DISTINCT FROM max(measured_at) OVER (PARTITION BY {same})"


@contextmanager
def opened(connection: duckdb.DuckDBPyConnection, listings: Iterable[Listing], *, check_again: bool = False) -> Iterator[Snapshot]:
    """A snapshot of the runs of ``listings``, its files let go of at the end. ``check_again``: take no earlier word for segments being
    whole.

    Raises duckdb.Error where a file vanished since it was listed, or cannot be read; UserError for a run of a newer schema, or one of
    which it cannot be told which rows stand. Where it raises, or the block does, the connection is to be closed, and the files with it.
    """
    snapshot = Snapshot(connection, listings)
    snapshot.attach(check_again)
    yield snapshot
    snapshot.detach()
