import json

import pytest

from depthbench.corpora import verify
from depthbench.corpora.card import read_card
from depthbench.corpora.integrity import check_files
from depthbench.errors import UserError


def flip(path, position=-1):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def refused(folder, message, check=verify):
    with pytest.raises(UserError, match=message) as caught:
        check(folder)
    text = str(caught.value)
    assert "\n" not in text
    assert f"run `depthbench data prepare text --source {read_card(folder).settings.sources[0]} " in text
    assert text.endswith(f"--out {folder} --force`")


def quick(folder):
    check_files(read_card(folder))


def test_an_untouched_corpus_passes(ready):
    assert verify(ready.folder) == ready
    quick(ready.folder)


@pytest.mark.parametrize("position", [0, 20, -1])
def test_a_flipped_byte_is_found_in_its_file(copy, position):
    flip(copy / "train" / "chunk-0-3.bin", position)
    quick(copy)  # sizes say nothing about it
    refused(copy, rf"corpus file {copy}/train/chunk-0-3.bin is damaged \(its bytes do not match their checksum\)")


@pytest.mark.parametrize("check", [verify, quick])
def test_a_truncated_chunk(copy, check):
    path = copy / "val" / "chunk-0-0.bin"
    path.write_bytes(path.read_bytes()[:-100])
    refused(copy, rf"{path} has [\d,]+ bytes in place of [\d,]+", check)


@pytest.mark.parametrize("check", [verify, quick])
def test_a_missing_chunk(copy, check):
    (copy / "train" / "chunk-0-1.bin").unlink()
    refused(copy, "train/chunk-0-1.bin is missing", check)


@pytest.mark.parametrize("check", [verify, quick])
def test_a_missing_split(copy, check):
    (copy / "val").rename(copy / "elsewhere")
    refused(copy, "val/chunk-0-0.bin is missing", check)


@pytest.mark.parametrize("check", [verify, quick])
def test_litdatas_index(copy, check):
    index = copy / "train" / "index.json"
    edit(index, lambda content: content["chunks"].reverse())
    refused(copy, "train/index.json does not list the chunks of card.json", check)
    index.write_text("{")
    refused(copy, "train/index.json is missing or damaged", check)
    index.unlink()
    refused(copy, "train/index.json is missing or damaged", check)


@pytest.mark.parametrize("check", [verify, quick])
@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["chunks"][0].update(chunk_size=3),
        lambda index: index["config"].update(data_format=["no_header_numpy:4"]),
        lambda index: index["config"].update(item_loader="PyTreeLoader"),
        lambda index: index["config"].update(compression="zstd"),
        lambda index: index["config"].update(data_spec="[]"),
        lambda index: index.pop("config"),
        lambda index: index.update(config=index["chunks"]),
    ],
)
def test_an_index_that_has_chunks_read_in_another_way(copy, check, change):
    edit(copy / "train" / "index.json", change)
    refused(copy, r"train/index.json is damaged \(its content does not match its checksum\)", check)


def test_every_byte_of_the_index_counts_but_those_of_its_time(copy):
    index = copy / "val" / "index.json"
    content = index.read_bytes()
    time_of_it = content.index(b'"updated_at": "') + len(b'"updated_at": "')
    for position in range(len(content)):
        flip(index, position)
        if position < time_of_it:
            with pytest.raises(UserError, match="val/index.json (is (missing or )?damaged|does not list)"):
                quick(copy)
        index.write_bytes(content)


def test_a_card_of_a_version_that_knew_no_checksum_of_the_index_is_read(copy):
    edit(copy / "card.json", lambda card: [card[name].pop("index_sha256") for name in ("train", "val")])
    assert verify(copy).train.index_sha256 == ""


def test_another_tokenizer_file(copy):
    flip(copy / "tokenizer.json")
    refused(copy, "tokenizer.json is damaged")


def test_a_card_that_was_edited(copy):
    edit(copy / "card.json", lambda card: card.update(block_length=18, fingerprint="0" * 64))
    for name in ("train", "val"):
        edit(copy / "card.json", lambda card, name=name: card[name].pop("index_sha256"))
        edit(copy / name / "index.json", lambda index: [chunk.update(dim=chunk["dim"] // 17 * 18) for chunk in index["chunks"]])
    refused(copy, "card.json does not match its own fingerprint")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": 99}', '{"format": 1}', "\xff"])
def test_a_card_that_cannot_be_read(copy, content):
    (copy / "card.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=r"card.json is damaged, or of another version of depthbench: run `depthbench data prepare` again"):
        read_card(copy)


def test_where_there_is_no_corpus(tmp_path):
    with pytest.raises(UserError, match="nowhere does not exist: make one with `depthbench data prepare`"):
        read_card(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"is not a prepared corpus \(it has no card.json\)"):
        read_card(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file is not a prepared corpus"):
        read_card(tmp_path / "file")
