"""One reader per file format: each yields (document, bytes of the file read so far). No torch.

.txt and .md: one document, or sections of about 64 KiB cut at a line's end where the file is longer, so that one long file can be
split into training and held-out text. .jsonl: a field of each line. .parquet: a column. Each may be compressed as .gz or .zst.
Whatever cannot be read is a UserError that names the file, and the line where there is one.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import tempfile
import tokenize
import zlib
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING

from depthbench.errors import UserError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

Documents = Iterator[tuple[str, int]]

SECTION = 64 * 1024  # characters
COMPRESSED = (".gz", ".zst")
_READ = 1 << 18


def kind_of(path: str) -> str:
    """The format by name, without .gz or .zst: ".jsonl" for "a.jsonl.zst"; "" where there is none."""
    name = path.rsplit("/", 1)[-1].lower()
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return "." + name.rsplit(".", 1)[1] if "." in name else ""


@contextlib.contextmanager
def reading(path: str):
    """Turn whatever goes wrong while reading ``path`` into a UserError that names it."""
    import zstandard

    try:
        yield
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start} of a line or block): convert it, or leave it out") from None
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise UserError(f"{path} is damaged or cut short ({error}): fetch it again, or leave it out") from None
    except OSError as error:
        raise _cannot_read(path, error) from None
    except Exception as error:
        if "://" not in path:
            raise
        raise _cannot_read(path, error) from None  # remote file systems fail in their own ways


def _cannot_read(path: str, error: Exception) -> UserError:
    mend = ": check the address and the network, or give local files" if "://" in path else ""
    return UserError(f"cannot read {path} ({_one_line(error)}){mend}")


def _one_line(error: Exception) -> str:
    text = " ".join((getattr(error, "strerror", None) or str(error) or type(error).__name__).split())
    return text if len(text) <= 200 else text[:199] + "…"


class _ZstdFile(io.RawIOBase):
    """A .zst file as a stream of bytes. Unlike zstandard's own reader it notices when the file ends within a frame."""

    def __init__(self, raw: IO[bytes]):
        self._raw, self._frame, self._ready = raw, None, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._ready:
            data = (self._frame.unused_data if self._frame and self._frame.eof else b"") or self._raw.read(_READ)
            if not data:
                if self._frame and not self._frame.eof:
                    raise EOFError("the last zstd frame is incomplete")
                return 0
            if self._frame is None or self._frame.eof:
                import zstandard

                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._ready = self._frame.decompress(data)
        taken = self._ready[: len(buffer)]
        self._ready = self._ready[len(taken) :]
        buffer[: len(taken)] = taken
        return len(taken)


@contextlib.contextmanager
def _opened(fs: AbstractFileSystem, path: str) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """(decompressed bytes, a function that says how many stored bytes are read)."""
    with fs.open(path, "rb") as raw:
        if path.lower().endswith(".gz"):
            yield gzip.GzipFile(fileobj=raw), raw.tell
        elif path.lower().endswith(".zst"):
            yield io.BufferedReader(_ZstdFile(raw), _READ), raw.tell
        else:
            yield raw, raw.tell


def _read_text(fs: AbstractFileSystem, path: str, size: int, field: str) -> Documents:
    with _opened(fs, path) as (stream, position):
        lines = io.TextIOWrapper(stream, encoding="utf-8-sig")
        section, length = [], 0
        while line := lines.readline(SECTION):
            section.append(line)
            length += len(line)
            if length >= SECTION:
                yield "".join(section), position()
                section, length = [], 0
        yield "".join(section), size


def _read_jsonl(fs: AbstractFileSystem, path: str, size: int, field: str) -> Documents:
    with _opened(fs, path) as (stream, position):
        for number, line in enumerate(stream, 1):
            if line.isspace():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(f"{where}: not valid JSON ({error}): correct the line or leave the file out") from None
            if not isinstance(row, dict):
                raise UserError(f"{where}: {type(row).__name__} in place of an object with a field '{field}'")
            if field not in row:
                raise UserError(f"{where}: no field '{field}'; name one with --field (known: {', '.join(row) or 'none'})")
            yield _text(row[field], f"{where}, field '{field}'"), position()


def _read_parquet(fs: AbstractFileSystem, path: str, size: int, field: str) -> Documents:
    import pyarrow
    import pyarrow.parquet

    with _opened(fs, path) as (stream, _), contextlib.ExitStack() as stack:
        if path.lower().endswith(COMPRESSED):  # parquet is read from its end, so it must be unpacked first
            unpacked = stack.enter_context(tempfile.TemporaryFile())
            while data := stream.read(_READ):
                unpacked.write(data)
            stream = unpacked
        try:
            table = pyarrow.parquet.ParquetFile(stream)
            names = table.schema_arrow.names
            if field not in names:
                raise UserError(f"{path}: no column '{field}'; name one with --column (known: {', '.join(names)})")
            done, rows = 0, max(table.metadata.num_rows, 1)
            for batch in table.iter_batches(batch_size=256, columns=[field]):
                done += batch.num_rows
                for value in batch.column(0).to_pylist():
                    yield _text(value, f"{path}, column '{field}'"), size * done // rows
        except pyarrow.ArrowException as error:
            raise UserError(f"{path} is damaged, or no parquet file ({_one_line(error)})") from None


def _read_python(fs: AbstractFileSystem, path: str, size: int, field: str) -> Documents:
    try:
        with tokenize.open(path) as file:  # by the encoding that its first lines declare
            yield file.read(), size
    except (SyntaxError, UnicodeDecodeError):
        yield "", size  # a few test inputs in the library are meant not to decode


def _text(value, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{where}: {type(value).__name__} in place of text")
    if value.isascii():
        return value
    # JSON may hold halves of surrogate pairs, which are no characters: they become U+FFFD.
    return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


READERS: dict[str, Callable[..., Documents]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".py": _read_python,
}
KINDS = (".txt", ".md", ".jsonl", ".parquet")
