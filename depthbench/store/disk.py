"""Putting files on disk whole or not at all, and saying what went wrong in the user's words."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import duckdb

from depthbench.errors import UserError

_FULL = {
    errno.ENOSPC: "no space left on the disk",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file size limit is reached",
}

# What a write that the disk refuses is raised as; DuckDB wraps the refusal in whatever it was doing.
WRITE_ERRORS = (OSError, duckdb.IOException, duckdb.TransactionException, duckdb.FatalException)


@contextmanager
def replacing(path: Path, named: Callable[[Path], Path] | None = None) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; what is written there takes the name ``path`` in one rename when the block ends.
    ``named`` gives another name, once it can look at what was written.

    A block that raises leaves ``path`` as it was and no temporary file. The file's data is synced before the rename, so that not even
    a power cut leaves the name on half a file; the rename itself is not synced: a power cut may lose the last seconds, a kill nothing.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        descriptor = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, named(temporary) if named else path)
    except BaseException:
        remove_leftovers(path.parent, temporary.name)
        raise


def remove_leftovers(folder: Path, pattern: str = ".*.tmp") -> None:
    """Remove temporary files that a killed writer left in ``folder``, DuckDB's write-ahead files beside them included."""
    for suffix in ("", ".wal"):
        for path in folder.glob(pattern + suffix):
            with suppress(OSError):
                path.unlink()


def write_error(folder: Path, error: Exception) -> UserError:
    """The one line for a write into ``folder`` that failed with one of ``WRITE_ERRORS``."""
    reason = next((text for code, text in _FULL.items() if _is(error, code)), None)
    if reason:
        mend = "free some, then repeat the same command: it goes on from the last checkpoint, and what was recorded so far is safe"
    else:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        mend = "make it writable, then repeat the same command, or choose another place with --runs DIR"
    return UserError(f"cannot write to {folder}: {reason}; {mend}")


def _is(error: Exception, code: int) -> bool:
    return getattr(error, "errno", None) == code or (isinstance(error, duckdb.Error) and os.strerror(code) in str(error))
