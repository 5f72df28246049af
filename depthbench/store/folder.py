"""What lies in a run folder, found without opening a file: segments, the sealed file, the heartbeat."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from depthbench.errors import UserError

SEGMENTS = "segments"
SEALED = "metrics.duckdb"
HEARTBEAT = "heartbeat"
STALE_AFTER_S = 120.0

clock = time.time  # seconds since the epoch; it may jump, forwards and back

_SEGMENT_NAME = re.compile(r"([a-z_]+)-(\d{6,})(?:-(\d{6,}))?(?:\.([0-9a-f]{8}))?\.parquet")


@dataclass(frozen=True, order=True)
class Segment:
    """One immutable file of rows of one table. Numbers count up over all tables of a run and are never used twice.

    A merged segment (``last`` > ``first``) holds what the table's segments ``first`` to ``last`` held; its name is the list of what it
    contains, so that it comes into being together with the file, in one rename. ``crc`` is the CRC-32 of the file's bytes, as eight hex
    digits; segments of older versions have none.
    """

    table: str
    first: int
    last: int
    crc: str = ""

    @property
    def name(self) -> str:
        last, crc = f"-{self.last:06d}" if self.merged else "", f".{self.crc}" if self.crc else ""
        return f"{self.table}-{self.first:06d}{last}{crc}.parquet"

    @property
    def merged(self) -> bool:
        return self.last > self.first

    def path(self, folder: Path) -> Path:
        return folder / SEGMENTS / self.name

    @staticmethod
    def parse(name: str) -> Segment | None:
        """The segment of that file name; None for any other file (temporary ones, strangers)."""
        match = _SEGMENT_NAME.fullmatch(name)
        return Segment(match[1], int(match[2]), int(match[3] or match[2]), match[4] or "") if match else None


@dataclass(frozen=True)
class Listing:
    """A run folder as it stood at one moment. Two equal listings mean the same rows: files never change under their name."""

    folder: Path
    segments: tuple[Segment, ...]
    sealed: tuple[int, int, int] | None  # inode, mtime in ns and size of metrics.duckdb

    @property
    def run_id(self) -> str:
        return self.folder.name

    @property
    def sealed_path(self) -> Path:
        return self.folder / SEALED

    def __bool__(self) -> bool:
        return bool(self.segments or self.sealed)

    def live(self, table: str, contained: Container[str] = (), damaged: Container[Segment] = ()) -> list[Segment]:
        """The table's segments whose rows no other file holds, oldest first. ``contained``: the names the sealed file lists; ``damaged``:
        segments that do not count, so that nothing is hidden behind one."""
        live: list[Segment] = []
        for segment in sorted((s for s in self.segments if s.table == table and s not in damaged), key=lambda s: (s.first, -s.last)):
            if not (live and segment.last <= live[-1].last) and segment.name not in contained:
                live.append(segment)
        return live


def list_run(folder: Path) -> Listing:
    """List a run folder while others write to it.

    Reading a directory is no snapshot: a merge during it may show neither the merged file nor all it replaces. A file that is there
    when a listing begins and stays is always seen, so two listings that agree are true for the moment between them. The sealed file
    comes last: it appears before the segments it contains go.
    """
    names = _names(folder)
    while (again := _names(folder)) != names:
        names = again
    try:
        stat = os.stat(folder / SEALED)
        sealed = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
    except (FileNotFoundError, NotADirectoryError):
        sealed = None
    return Listing(folder, tuple(sorted(filter(None, map(Segment.parse, names)))), sealed)


def _names(folder: Path) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder / SEGMENTS))
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()


def run_folders(runs_dir: Path) -> list[Path]:
    """The folders below ``runs_dir`` that hold rows of a run, by name. No such folder: an empty list."""
    try:
        with os.scandir(runs_dir) as entries:
            folders = [Path(entry.path) for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(folder for folder in folders if is_run_folder(folder))


def is_run_folder(folder: Path) -> bool:
    return (folder / SEALED).is_file() or any(map(Segment.parse, _names(folder)))


def refuse_unwritable(folder: Path) -> None:
    """Raise UserError for a path that DuckDB cannot write to: it takes ``?`` for a pattern and a backslash for a separator."""
    if any(sign in str(folder) for sign in "?\\"):
        raise UserError(f"DuckDB cannot write to a folder called '{folder}': use a name without question marks and backslashes")


def heartbeat_at(folder: Path) -> float | None:
    """When a writer last gave a sign of life, in seconds since the epoch."""
    try:
        return os.stat(folder / HEARTBEAT).st_mtime
    except OSError:
        return None


def give_sign_of_life(folder: Path) -> None:
    """Set the heartbeat to now. Raises OSError."""
    (folder / HEARTBEAT).touch()


def is_silent(folder: Path) -> bool:
    """No heartbeat within two minutes of now: a run of status running is then stale.

    A heartbeat from the future is none: the clock was set back since, and whoever lives gives a new sign within seconds.
    """
    beat = heartbeat_at(folder)
    return beat is None or abs(clock() - beat) > STALE_AFTER_S


def version_of(listing: Listing) -> str:
    """A short text that differs whenever the run's rows, or whether it has fallen silent, differ. Opens no file.

    The folder's time tells a run from one that was begun afresh in its place, with files of the same names; the files' times tell of
    damage.
    """
    place = os.path.join(listing.folder, SEGMENTS)
    names = [segment.name for segment in listing.segments]
    changed = [_changed_at(place), *(_changed_at(f"{place}/{name}") for name in names)]
    facts = repr((names, listing.sealed, changed, is_silent(listing.folder)))
    return hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()


def _changed_at(path: str) -> int | None:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None
