"""A sealed run's line in the list of runs, kept beside its sealed file so that 500 runs are listed without opening 500 databases.

Opening a sealed file, asking and closing it takes about 3.5 ms, reading its summary 0.1 ms. The summary's name holds the size and the
time of change of the one sealed file it was made from, so it can never speak for another; where none fits (the run goes on, or the
folder was copied without its times) the rows are asked, and the answer is the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from depthbench.store.folder import SEALED, Listing
from depthbench.store.queries import RUNS, RUNS_COLUMNS
from depthbench.store.schema import SCHEMA_VERSION

_TIMES = [name for name, sql_type in RUNS_COLUMNS.items() if sql_type == "TIMESTAMP"]


def keep_summary(folder: Path, sealed: os.stat_result, answer: dict) -> None:
    """Keep ``answer`` (one row of queries.RUNS) for the sealed file that is about to be renamed into ``folder``.

    Nothing depends on it: a disk that is full now, or a kill, leaves it out.
    """
    with suppress(OSError):
        _path(folder, sealed.st_mtime_ns, sealed.st_size).write_text(json.dumps([_question(), answer], default=datetime.isoformat))


def kept_summary(listing: Listing) -> dict | None:
    """The row of queries.RUNS that was kept for the run as it is listed; None where it must be asked."""
    if listing.segments or not listing.sealed:
        return None
    try:
        question, answer = json.loads(_path(listing.folder, *listing.sealed[1:]).read_text())
    except (OSError, ValueError):
        return None
    if question != _question():
        return None
    times = {name: datetime.fromisoformat(answer[name]) for name in _TIMES if answer[name]}
    return {**answer, **times, "run_id": listing.run_id}


def drop_other_summaries(folder: Path) -> None:
    """Remove the summaries of sealed files that are no more."""
    sealed = os.stat(folder / SEALED)
    for path in folder.glob(".summary-*.json"):
        if path != _path(folder, sealed.st_mtime_ns, sealed.st_size):
            path.unlink(missing_ok=True)


def _question() -> str:
    """What was asked: a release with another query, other columns or another schema does not take this one's answer."""
    return hashlib.blake2b(f"{SCHEMA_VERSION} {RUNS_COLUMNS} {RUNS}".encode(), digest_size=8).hexdigest()


def _path(folder: Path, mtime_ns: int, size: int) -> Path:
    return folder / f".summary-{mtime_ns}-{size}.json"
