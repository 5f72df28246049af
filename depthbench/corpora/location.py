"""A corpus folder's address: a local path, or a URL that LitData streams from. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

# LitData's schemes. Not hf://, which it takes for parquet; "local:" is a folder treated like a remote one, e.g. a slow network disk.
REMOTE = ("s3://", "gs://", "r2://", "azure://", "local:")


def located(folder: Path | str) -> Path | str:
    """A URL as it is, anything else as a Path."""
    remote = isinstance(folder, str) and folder.startswith(REMOTE)
    return folder.rstrip("/") if remote else Path(folder).expanduser()


def open_folder(folder: Path | str) -> tuple[AbstractFileSystem, str]:
    """(file system, path in it) of a located folder."""
    import fsspec

    return fsspec.core.url_to_fs(str(folder).removeprefix("local:"))
