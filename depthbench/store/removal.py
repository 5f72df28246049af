"""Removing run folders: whole or not at all, and never one that is being written."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from depthbench.errors import UserError
from depthbench.store.folder import is_silent
from depthbench.store.lock import run_lock

PREFIX = ".removed-"  # no listing shows what begins with a dot


def why_kept(folder: Path, status: str) -> str | None:
    """Why the run may not be removed now, in a few words; None where it may. ``status``: as readers see it."""
    if folder.is_symlink():
        return "it is a link: remove that by hand"
    if status == "running" and not is_silent(folder):
        return "it is running: interrupt it first, or wait two minutes after a kill"
    return why_locked(folder)


def why_locked(folder: Path) -> str | None:
    """Why the run cannot be written now: who else writes to it, or what the disk says. None where it can."""
    try:
        with run_lock(folder):
            return None
    except UserError as error:
        return str(error)


def remove_run(folder: Path) -> None:
    """Remove a run folder. Raises UserError where another process writes to it, or where the disk refuses.

    It is renamed aside first: killed at any moment, the run is either whole or gone, never half of one. What a kill left aside,
    ``sweep`` removes.
    """
    aside = folder.with_name(f"{PREFIX}{folder.name}-{time.time_ns()}")
    with run_lock(folder):
        try:
            os.rename(folder, aside)
            with suppress(FileNotFoundError):  # another process sweeps it at this moment, and ends what was begun here
                shutil.rmtree(aside)
        except OSError as error:
            raise UserError(f"cannot remove {error.filename or folder}: {error.strerror}; make it writable, and repeat") from error


def sweep(runs_dir: Path) -> None:
    """Remove what killed removals left in the folder of all runs, as far as the disk allows."""
    for aside in runs_dir.glob(f"{PREFIX}*"):
        shutil.rmtree(aside, ignore_errors=True)


def bytes_of(folder: Path) -> int:
    """What the files below ``folder`` hold; one that vanishes meanwhile counts nothing."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total
