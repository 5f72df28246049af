"""Where documents come from: the running Python's own source, text files, FineWeb-Edu's parquet shards. No torch.

A source is a fixed list of files in a fixed order; reading it twice gives the same documents. Local paths and remote ones
("hf://datasets/...", "s3://...") go through fsspec alike.
"""

from __future__ import annotations

import glob
import hashlib
import json
import math
import platform
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from depthbench.corpora.readers import KINDS, READERS, kind_of, reading
from depthbench.errors import UserError, unknown

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

CORPORA = ("embedded", "text", "fineweb-edu")
FINEWEB_EDU = "hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT"

# The embedded corpus must be the same on every machine with this Python, so whatever a distribution ships apart, strips or
# generates is left out: the test suites, the Tk and IDLE programs, what builds packages. `encodings` too: its dozens of
# code tables are near copies of each other, and copies on both sides of the held-out split would flatter every model.
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "__phello__"}
LEFT_OUT |= {"idlelib", "tkinter", "turtledemo", "lib2to3", "distutils", "ensurepip", "venv", "encodings"}
LEFT_OUT_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize", "turtle.py")

SAMPLE_FILES = 32


@dataclass(frozen=True)
class SourceFile:
    """One file of a source; ``size`` in bytes as stored, compressed or not."""

    path: str
    size: int
    fs: AbstractFileSystem
    kind: str

    def documents(self, field: str) -> Iterator[tuple[str, int]]:
        """(text, bytes of this file read so far) for each of its documents."""
        with reading(self.path):
            yield from READERS[self.kind](self.fs, self.path, self.size, field)


@dataclass(frozen=True)
class Source:
    """A corpus before tokenisation. ``asked`` are the paths and patterns as the user may repeat them."""

    corpus: str
    description: str
    files: tuple[SourceFile, ...]
    field: str = "text"
    asked: tuple[str, ...] = ()

    @cached_property
    def size(self) -> int:
        """Bytes of all files as stored."""
        return sum(file.size for file in self.files)

    def documents(self) -> Iterator[tuple[str, int]]:
        """(text, bytes of the source read so far) for each document; empty documents are passed over."""
        done = 0
        for file in self.files:
            for text, position in file.documents(self.field):
                if text:
                    yield text, done + min(position, file.size)
            done += file.size

    def sample(self, limit: int) -> Iterator[str]:
        """Documents to train a tokenizer on: at most about ``limit`` characters, from the start of files evenly spaced.

        As many files as hold that much text, but no fewer than ``SAMPLE_FILES``, so that a few large shards all have their share
        and thousands of them are not all opened.
        """
        count = min(len(self.files), max(SAMPLE_FILES, math.ceil(len(self.files) * limit / max(self.size, 1))))
        for i in range(count):
            left = limit // count if self.size > limit else limit
            for text, _ in self.files[i * len(self.files) // count].documents(self.field):
                yield text[:left]
                left -= len(text)
                if left <= 0:
                    break

    def digest(self) -> str:
        """SHA-256 over the files' names and sizes: another one means that the source has changed."""
        names = [[file.path, file.size] for file in self.files]
        return hashlib.sha256(json.dumps([self.field, names]).encode()).hexdigest()


def open_source(corpus: str, asked: Iterable[str] = (), field: str = "text") -> Source:
    """The source of a corpus.

    ``asked``: files, folders, globs or URLs; none for "embedded", and by default the published 10BT sample for "fineweb-edu".
    ``field``: the field of .jsonl, and the column of .parquet, that holds the text. UserError where nothing is found.
    """
    asked = tuple(_absolute(source) for source in asked)
    if corpus == "embedded":
        if asked:
            raise UserError("the embedded corpus takes no --source: use `depthbench data prepare text --source ...`")
        return _embedded()
    if corpus not in CORPORA:
        raise unknown("corpus", corpus, CORPORA)
    if corpus == "fineweb-edu":
        asked, kinds = asked or (FINEWEB_EDU,), (".parquet",)
    else:
        kinds = KINDS
    if not asked:
        raise UserError("a text corpus needs --source: files, folders or globs of " + ", ".join(KINDS) + " (also .gz and .zst)")
    found = {file.path: file for source in asked for file in _expand(source, kinds)}
    return Source(corpus, f"{len(found)} file{'s' if len(found) > 1 else ''}", tuple(found.values()), field, asked)


def _embedded() -> Source:
    import fsspec

    root = Path(sysconfig.get_path("stdlib"))
    local = fsspec.filesystem("file")
    paths = (path for path in root.rglob("*.py") if _is_library(path.relative_to(root)))
    files = tuple(SourceFile(str(path), path.stat().st_size, local, ".py") for path in sorted(paths))
    if not files:
        raise UserError(f"this Python has no standard library source under {root}: use `depthbench data prepare text --source ...`")
    return Source("embedded", f"Python {platform.python_version()} standard library, {len(files)} files", files)


def _is_library(path: Path) -> bool:
    folders = path.parts[:-1]
    generated = any(part.startswith("config-") for part in folders)
    return not (generated or LEFT_OUT & set(folders) or path.name.startswith(LEFT_OUT_FILES))


def _absolute(source: str) -> str:
    return source if "://" in source else str(Path(source).expanduser().absolute())


def _expand(source: str, kinds: tuple[str, ...]) -> list[SourceFile]:
    """The files behind one path, folder, glob or URL, sorted by name."""
    import fsspec

    with reading(source):
        try:
            fs, path = fsspec.core.url_to_fs(source)
        except (ImportError, ValueError) as error:
            raise UserError(f"cannot open {source}: {error}") from None
        infos = _infos(fs, path)
    if infos is None:
        what = "no file matches" if glob.has_magic(source) else "there is no file or folder"
        raise UserError(f"{what} '{source}': correct --source")
    files = (SourceFile(_address(fs, name), infos[name]["size"], fs, kind_of(name)) for name in sorted(infos))
    wanted = [file for file in files if file.kind in kinds]
    if not wanted:
        raise UserError(f"{source} holds no text that can be read: the formats are {', '.join(kinds)}, each also as .gz and .zst")
    return wanted


def _infos(fs: AbstractFileSystem, path: str) -> dict[str, dict] | None:
    """{name: {"size": bytes, ...}} of the files behind a path of ``fs``, or None where there are none."""
    try:
        info = fs.info(path)
    except FileNotFoundError:
        infos = fs.glob(path, detail=True) if glob.has_magic(path) else {}
        return {name: info for name, info in infos.items() if info["type"] == "file"} or None
    return fs.find(path, detail=True) if info["type"] == "directory" else {info["name"]: info}


def _address(fs: AbstractFileSystem, name: str) -> str:
    """What a user would write: a plain path, or a URL."""
    return name if fs.unstrip_protocol(name).startswith("file://") else fs.unstrip_protocol(name)
