import sysconfig
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from depthbench.corpora.sources import open_source
from depthbench.errors import UserError


def test_the_embedded_corpus_is_the_library_without_what_distributions_split_off():
    source = open_source("embedded")
    names = [Path(file.path).relative_to(sysconfig.get_path("stdlib")).as_posix() for file in source.files]
    assert names == sorted(names, key=lambda name: Path(name).parts)
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    left_out = ("test/", "idlelib/", "tkinter/", "encodings/", "ensurepip/", "_sysconfigdata")
    assert not [name for name in names if name.startswith(left_out) or "/test" in name or "site-packages" in name]
    texts = [text for text, _ in source.documents()]
    assert sum(map(len, texts)) > 5e6
    assert any("class ArgumentParser" in text for text in texts)
    assert [text for text, _ in open_source("embedded").documents()] == texts


def test_files_folders_and_globs_in_the_order_asked_each_file_once(tmp_path, monkeypatch):
    for name in ("z.txt", "b/2.md", "b/1.txt", "b/skip.py", "c/deep/3.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}')
    monkeypatch.chdir(tmp_path)
    source = open_source("text", ["z.txt", "b", "**/*.txt", "c/**/*.jsonl"])
    assert [Path(file.path).relative_to(tmp_path).as_posix() for file in source.files] == ["z.txt", "b/1.txt", "b/2.md", "c/deep/3.jsonl"]
    assert source.asked == tuple(str(tmp_path / name) for name in ("z.txt", "b", "**/*.txt", "c/**/*.jsonl"))


def test_a_file_whose_name_looks_like_a_pattern(tmp_path):
    (tmp_path / "a[1].txt").write_text("hello")
    assert [text for text, _ in open_source("text", [str(tmp_path / "a[1].txt")]).documents()] == ["hello"]


def test_fineweb_edu_shards_from_a_folder(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = {"text": "words", "id": "1", "dump": "CC", "url": "u", "file_path": "f", "language": "en", "language_score": 0.9}
    row |= {"token_count": 3, "score": 3.5, "int_score": 4}
    for shard in ("001_00000", "000_00000"):
        (tmp_path / "sample" / "10BT").mkdir(parents=True, exist_ok=True)
        table = pa.Table.from_pylist([row | {"text": f"{shard} {i}"} for i in range(3)])
        pq.write_table(table, tmp_path / "sample" / "10BT" / f"{shard}.parquet")
    (tmp_path / "README.md").write_text("not a shard")
    texts = [text for text, _ in open_source("fineweb-edu", [str(tmp_path)]).documents()]
    assert texts == [f"{shard} {i}" for shard in ("000_00000", "001_00000") for i in range(3)]


def test_a_url_is_read_through_its_file_system():
    memory = fsspec.filesystem("memory")
    memory.pipe("/source-test/b.txt", b"second")
    memory.pipe("/source-test/a.txt", b"first")
    source = open_source("text", ["memory://source-test"])
    assert [text for text, _ in source.documents()] == ["first", "second"]
    assert source.asked == ("memory://source-test",)
    assert all(file.path.startswith("memory://") for file in source.files)


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("Max retries exceeded\nwith url")

    monkeypatch.setattr(MemoryFileSystem, "info", refuse)
    with pytest.raises(UserError, match=r"cannot read memory://shards \(Max retries exceeded with url\): check the address") as caught:
        open_source("fineweb-edu", ["memory://shards"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("corpus", "asked", "message"),
    [
        ("text", [], "a text corpus needs --source"),
        ("text", ["missing.txt"], "there is no file or folder '/.*missing.txt': correct --source"),
        ("text", ["missing*.txt"], "no file matches '/.*missing"),
        ("text", ["program.py"], r"program.py holds no text that can be read: the formats are \.txt, \.md, \.jsonl, \.parquet"),
        ("text", ["."], "holds no text that can be read"),
        ("fineweb-edu", ["notes.txt"], r"the formats are \.parquet, each"),
        ("text", ["nowhere://x"], "cannot open nowhere://x"),
        ("embedded", ["program.py"], "the embedded corpus takes no --source"),
        ("embeded", [], "did you mean 'embedded'"),
    ],
)
def test_wrong_sources_are_refused(tmp_path, monkeypatch, corpus, asked, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text("pass")
    if corpus == "fineweb-edu":
        (tmp_path / "notes.txt").write_text("text")
    with pytest.raises(UserError, match=message):
        open_source(corpus, asked)


def test_a_python_without_source_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match="no standard library source under"):
        open_source("embedded")


def test_a_sample_takes_a_share_of_evenly_spaced_files(tmp_path):
    for i in range(100):
        (tmp_path / f"{i:03}.txt").write_text(f"{i:03}" * 1000)
    source = open_source("text", [str(tmp_path)])
    sample = list(source.sample(3200))
    assert [text[:3] for text in sample] == [f"{i * 100 // 32:03}" for i in range(32)]
    assert {len(text) for text in sample} == {100}
    assert sum(map(len, source.sample(10**9))) == source.size


def test_the_digest_follows_names_sizes_and_field(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}')
    digest = open_source("text", [str(path)]).digest()
    assert open_source("text", [str(path)]).digest() == digest
    assert open_source("text", [str(path)], "body").digest() != digest
    path.write_text('{"text": "xx"}')
    assert open_source("text", [str(path)]).digest() != digest
