"""Asking questions of run folders while others write to them, seal them or remove them, and though one of them may be unreadable."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import duckdb

from depthbench.errors import UserError
from depthbench.store.folder import SEALED, Listing, list_run
from depthbench.store.sources import Snapshot, connect, opened

Answer = TypeVar("Answer")

# Sealed files that are open at the same time: well below the usual limit of 1,024 open files.
_BATCH = 64
_IDLE_CONNECTIONS = 8
_MAX_TRIES = 8


class Reading:
    """Takes snapshots of runs, each on a connection that no other thread uses meanwhile. May be shared by threads.

    A DuckDB connection shared between threads returns wrong rows, and opening one costs 12 ms: so they are lent out and kept.
    """

    def __init__(self):
        self._idle: list[duckdb.DuckDBPyConnection] = []
        self._threads = min(4, os.cpu_count() or 1)

    def ask(self, folders: Sequence[Path], question: Callable[[Snapshot], Answer]) -> Answer:
        """The answer to ``question`` about these runs. Raises UserError, one line, where one of them cannot be read.

        A file that vanished was merged or sealed meanwhile: the folders are listed again, for as long as that makes a difference. Then
        every segment is checked again: one may have been damaged since it was.
        """
        listings, check_again = [list_run(folder) for folder in folders], False
        for _ in range(_MAX_TRIES):
            try:
                with self._connection() as connection, opened(connection, listings, check_again=check_again) as snapshot:
                    return question(snapshot)
            except duckdb.Error as error:
                before, listings = listings, [list_run(folder) for folder in folders]
                if listings == before and check_again:
                    raise unreadable(folders, error) from error
                check_again, failure = listings == before, error
        raise unreadable(folders, failure) from failure

    def ask_all(self, folders: Sequence[Path], question: Callable[[Snapshot], Answer]) -> tuple[list[Answer], dict[Path, UserError]]:
        """The answers of batches of these runs (of one empty batch where there are none), and what is wrong with those left out."""
        answers, problems = [], {}
        for start in range(0, len(folders) or 1, _BATCH):
            batch = folders[start : start + _BATCH]
            try:
                answers.append(self.ask(batch, question))
            except UserError as error:
                if len(batch) == 1:
                    problems[batch[0]] = error
                    continue
                for folder in batch:  # one bad run must not hide the others of its batch
                    more_answers, more_problems = self.ask_all([folder], question)
                    answers += more_answers
                    problems |= more_problems
        return answers, problems

    @contextmanager
    def _connection(self) -> Iterator[duckdb.DuckDBPyConnection]:
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = connect(self._threads)
        try:
            yield connection
        except BaseException:
            connection.close()  # whatever is still attached goes with it
            raise
        if len(self._idle) < _IDLE_CONNECTIONS:
            self._idle.append(connection)
        else:
            connection.close()


@contextmanager
def opened_by_writer(listing: Listing) -> Iterator[Snapshot]:
    """A snapshot for whoever holds the run's lock, every segment checked again. Raises UserError, one line, where it cannot be read."""
    try:
        with connect() as connection, opened(connection, [listing], check_again=True) as snapshot:
            yield snapshot
    except duckdb.Error as error:
        raise unreadable([listing.folder], error) from error


def unreadable(folders: Sequence[Path], error: duckdb.Error) -> UserError:
    """The one line for runs that DuckDB cannot read. It names the file: of a damaged block DuckDB says only where in the file it is."""
    names, reason = ", ".join(folder.name for folder in folders[:3]), str(error).splitlines()[0]
    file = f"{SEALED}: " if str(folders[0]) not in reason and (folders[0] / SEALED).exists() else ""
    return UserError(f"run {names} cannot be read: {file}{reason}; put back a whole copy of it, or start it over with --fresh")
