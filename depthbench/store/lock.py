"""One writer per run folder: a lock the kernel holds for as long as the process lives.

It is a POSIX record lock on ``<run folder>/.lock``: a killed holder loses it at once, so it cannot go stale; forked children (data
loader workers) do not inherit it; shared file systems that offer locks carry it between machines. The file's text says who holds it,
for the message only.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from depthbench.errors import UserError

LOCK = ".lock"

# The kernel's lock belongs to the process: it neither keeps a process from itself, nor survives closing a second descriptor of the
# same file. So the process keeps one descriptor per folder, and counts.
_held: dict[Path, tuple[int, int]] = {}
_guard = threading.Lock()


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the run's lock; reentrant within the process. Makes the folder where it is missing.

    Raises UserError at once, naming the holder's host and process, where another process writes to the run; and where the folder
    cannot be written.
    """
    key = Path(folder).resolve()
    with _guard:
        descriptor, depth = _held.get(key) or (_acquire(Path(folder)), 0)
        _held[key] = (descriptor, depth + 1)
    try:
        yield
    finally:
        with _guard:
            descriptor, depth = _held.pop(key)
            if depth > 1:
                _held[key] = (descriptor, depth - 1)
            else:
                os.close(descriptor)


def _acquire(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; choose another place with --runs DIR") from error
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        return descriptor
    except OSError as error:
        holder = os.pread(descriptor, 300, 0).decode(errors="replace") or "another process"
        os.close(descriptor)
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise UserError(f"run {folder.name} is being written by {holder}: wait until it ends, or stop it, and repeat") from error
        raise UserError(f"cannot lock {folder}: {error.strerror}; choose a place on another disk with --runs DIR") from error
