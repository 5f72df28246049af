"""Write a folder beside its place, and rename it there: whoever looks sees the whole of it or nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from depthbench.errors import UserError


@contextlib.contextmanager
def staged(out: Path) -> Iterator[Path]:
    """An empty folder beside ``out`` that becomes ``out``, in place of what was there, when the block ends without an error.

    After an error it is removed; after a kill, the next call removes it. Call it under ``locked(out)``.
    """
    partial, old = _beside(out, "partial"), _beside(out, "old")
    for leftover in (partial, old):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir()
    try:
        yield partial
        if out.exists():
            os.rename(out, old)
        os.rename(partial, out)
    finally:
        for leftover in (partial, old):
            shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """One process at a time makes ``out``; the others wait. The lock dies with its process."""
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(_beside(out, "lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"another process is preparing {out}: waiting for it", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def write_errors(out: Path) -> Iterator[None]:
    """Turn what the operating system refuses while ``out`` is written into a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            mend = "free some space, or choose another place with --out; the unfinished files are removed"
            raise UserError(f"the disk is full: cannot write {out}: {mend}") from None
        reason = error.strerror or str(error)
        raise UserError(f"cannot write {out} ({reason}): choose another place with --out or $DEPTHBENCH_DATA") from None


def _beside(out: Path, what: str) -> Path:
    return out.parent / f".{out.name}.{what}"
