import gzip
import json

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from depthbench.corpora import readers
from depthbench.corpora.sources import open_source
from depthbench.errors import UserError

TEXTS = ["first line\nsecond line\n", "naïve 北京 🙂", "third\tdocument"]


def as_text(texts):
    return texts[0].encode()


def as_jsonl(texts):
    return "".join(json.dumps({"n": 1, "text": text}, ensure_ascii=False) + "\n" for text in texts).encode()


def as_parquet(texts):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": texts, "score": [1.0] * len(texts)}), sink, row_group_size=2)
    return sink.getvalue().to_pybytes()


FORMATS = {".txt": as_text, ".md": as_text, ".jsonl": as_jsonl, ".parquet": as_parquet}
PACKERS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


def read(path, field="text"):
    return [text for text, _ in open_source("text", [str(path)], field).documents()]


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_and_compression_gives_its_documents(tmp_path, kind, packing):
    path = tmp_path / f"file{kind}{packing}"
    path.write_bytes(PACKERS[packing](FORMATS[kind](TEXTS)))
    assert read(path) == (TEXTS[:1] if kind in (".txt", ".md") else TEXTS)


@pytest.mark.parametrize("packing", PACKERS)
def test_the_position_ends_at_the_size_of_the_files(tmp_path, packing):
    for name in "ab":
        path = tmp_path / f"{name}.jsonl{packing}"
        path.write_bytes(PACKERS[packing](as_jsonl(TEXTS * 50)))
    source = open_source("text", [str(tmp_path)])
    positions = [position for _, position in source.documents()]
    assert positions == sorted(positions)
    assert positions[-1] == source.size == sum(path.stat().st_size for path in tmp_path.iterdir())


def test_several_zstd_frames_are_one_file(tmp_path):
    compress = zstandard.ZstdCompressor().compress
    (tmp_path / "a.txt.zst").write_bytes(compress(b"one ") + compress(b"two ") + compress(b"three"))
    assert read(tmp_path / "a.txt.zst") == ["one two three"]


def test_a_long_text_file_becomes_sections_that_join_to_the_file(tmp_path):
    text = "".join(f"line {i} of a long file\n" for i in range(20_000)) + "x" * 200_000
    (tmp_path / "long.txt").write_text(text)
    sections = read(tmp_path / "long.txt")
    assert "".join(sections) == text
    assert len(sections) > 8
    assert max(map(len, sections)) < 2 * readers.SECTION
    assert all(section.endswith("\n") for section in sections[:6])


def test_another_field_and_a_byte_order_mark(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "hello"}\n\n{"body": ""}\n{"body": null}\n{"body": "again"}\n')
    assert read(tmp_path / "a.jsonl", "body") == ["hello", "again"]
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert read(tmp_path / "b.txt") == ["hello"]


def test_half_a_surrogate_pair_becomes_a_replacement_character(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a \\ud83d b \\ud83d\\ude42"}\n')
    assert read(tmp_path / "a.jsonl") == ["a \ufffd b 🙂"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "ok"}\n{"text": \n', "a.jsonl, line 2: not valid JSON"),
        ("a.jsonl", b'{"text": "ok"}\n[1]\n', "a.jsonl, line 2: list in place of an object"),
        ("a.jsonl", b'{"body": "ok", "id": 1}\n', r"a.jsonl, line 1: no field 'text'; name one with --field \(known: body, id\)"),
        ("a.jsonl", b'{"text": 7}\n', "a.jsonl, line 1, field 'text': int in place of text"),
        ("a.txt", b"caf\xe9 au lait", "a.txt is not UTF-8 text"),
        ("a.txt.gz", gzip.compress(b"hello " * 9999)[:-20], "a.txt.gz is damaged or cut short"),
        ("a.txt.gz", b"not gzip at all", "a.txt.gz is damaged or cut short"),
        ("a.txt.zst", zstandard.ZstdCompressor().compress(b"hello " * 9999)[:-5], "a.txt.zst is damaged or cut short"),
        ("a.jsonl.zst", b"not zstd at all", "a.jsonl.zst is damaged or cut short"),
        ("a.parquet", b"not parquet", "a.parquet is damaged, or no parquet file"),
        ("a.parquet", as_parquet(TEXTS)[:-40], "a.parquet is damaged, or no parquet file"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_parquet_errors_name_the_columns(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"content": ["x"], "score": [1.5]}), path)
    with pytest.raises(UserError, match=r"no column 'text'; name one with --column \(known: content, score\)"):
        read(path)
    with pytest.raises(UserError, match="column 'score': float in place of text"):
        read(path, "score")


def test_python_source_is_read_by_its_declared_encoding(tmp_path):
    (tmp_path / "a.py").write_bytes("# coding: latin-1\nname = 'café'\n".encode("latin-1"))
    (tmp_path / "b.py").write_bytes(b"# coding: no-such-codec\n")
    local = fsspec.filesystem("file")
    assert [t for t, _ in readers.READERS[".py"](local, str(tmp_path / "a.py"), 1, "")] == ["# coding: latin-1\nname = 'café'\n"]
    assert [t for t, _ in readers.READERS[".py"](local, str(tmp_path / "b.py"), 1, "")] == [""]
