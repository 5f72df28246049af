"""Telling damaged segments from whole ones, so that a bad disk is named and never read as other rows.

A segment has the CRC-32 of its bytes in its name; each is checked once by every process that reads it. A sealed file needs nothing of the
kind: DuckDB keeps a checksum in each of its blocks, the headers included, and compares it whenever it reads one.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from depthbench.store.folder import SEGMENTS, Listing, Segment

_MAX_KNOWN = 50_000  # files whose verdicts are kept; merged and sealed ones are never asked about again
_CHUNK = 1 << 20

_verdicts: dict[str, tuple[tuple[int, int, int], str | None]] = {}


def checksum(path: Path | str) -> str:
    """CRC-32 of a file's bytes, as eight hex digits. About 0.25 ms per MB. Raises OSError."""
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return f"{crc:08x}"


def damaged_segments(listing: Listing, *, again: bool = False) -> dict[Segment, str]:
    """The listed segments that cannot be read as they were written, and why, in a few words. One that vanished is not damaged.

    A file is checked when it is first seen, and when its inode, size or time of change differ from then; with ``again`` in any case:
    for whoever is about to remove it.
    """
    place = os.path.join(listing.folder, SEGMENTS)
    found = ((segment, damage(f"{place}/{segment.name}", segment, again=again)) for segment in listing.segments)
    return {segment: why for segment, why in found if why}


def damage(path: str, segment: Segment, *, again: bool = False) -> str | None:
    """Why the file at ``path`` is not what was written as ``segment``; None where it is, or is not there."""
    try:
        stat = os.stat(path)
        identity = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        known = _verdicts.get(path)
        if known and known[0] == identity and not again:
            return known[1]
        why = _why_damaged(path, segment)
    except FileNotFoundError:
        return None
    except OSError as error:  # perhaps not for good: asked again the next time
        return error.strerror or str(error)
    if len(_verdicts) >= _MAX_KNOWN:
        _verdicts.clear()
    _verdicts[path] = (identity, why)
    return why


def _why_damaged(path: str, segment: Segment) -> str | None:
    if segment.crc:
        return None if checksum(path) == segment.crc else "its bytes do not have the checksum in its name"
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            file.read()
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        return "it is no whole Parquet file"
    return None
