import argparse
import json

import pytest

from depthbench.corpora import read_card
from depthbench.errors import UserError
from depthbench.verbs import data
from tests.corpora.conftest import made_up_documents, write_jsonl


@pytest.fixture
def call(capsys):
    def call(*words):
        parser = argparse.ArgumentParser()
        data.add_arguments(parser)
        assert data.run(parser.parse_args([str(word) for word in words])) == 0
        return capsys.readouterr().out

    return call


@pytest.fixture
def source(tmp_path):
    return write_jsonl(tmp_path / "documents.jsonl", made_up_documents(300), field="body")


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("DEPTHBENCH_DATA", str(tmp_path / "corpora"))
    return tmp_path / "corpora"


def test_prepare_verify_info(call, source, root):
    assert call("info") == f"no corpora under {root}; `depthbench data prepare embedded` makes one\n"
    words = ("prepare", "text", "--source", source, "--field", "body", "--tokenizer", "bpe-300", "--seq-len", "16", "--workers", "1")
    printed = call(*words)
    name = "text-bpe-300-T16"
    card = read_card(root / name)
    assert (card.documents, card.vocab_size, card.seq_len) == (300, 300, 16)
    for figure in (root / name, card.fingerprint, "bpe-300, 300 tokens", f"{card.train.tokens_used:,}", f"{card.unigram_entropy:.4f} nats"):
        assert str(figure) in printed
    assert call(*words) == call("info", name) == call("info", root / name) == printed
    assert call("info") == f"{name}: 1 file; {card.tokens_used:,} tokens of bpe-300, T = 16\n"
    assert call("verify", name) == f"{root / name}: 2 chunks, {card.tokens_used:,} tokens, every byte as it was written\n"

    chunk = root / name / "train" / "chunk-0-0.bin"
    content = bytearray(chunk.read_bytes())
    content[1000] ^= 4
    chunk.write_bytes(content)
    with pytest.raises(UserError, match=f"corpus file {chunk} is damaged"):
        call("verify", name)
    (root / name / "card.json").write_text("{")
    assert f"{name}: {root / name}/card.json is damaged" in call("info")


def test_a_size_gives_tokenizer_t_and_held_out_tokens(call, tmp_path, root):
    source = write_jsonl(tmp_path / "a.jsonl", made_up_documents(9000))
    call("prepare", "text", "--size", "pico", "--source", source, "--out", tmp_path / "out")
    card = read_card(tmp_path / "out")
    assert (card.tokenizer, card.seq_len, card.vocab_size) == ("bpe-512", 128, 512)
    assert 65_536 <= card.val.blocks * 128 < card.train.blocks * 128
    assert card.settings.val_tokens == 65_536


def test_options_reach_the_corpus(call, source, tmp_path):
    options = {"--tokenizer": "bpe-280", "--seq-len": "20", "--column": "body", "--val-fraction": 0.3, "--max-tokens": "9k"}
    call("prepare", "text", "--source", source, "--out", tmp_path / "out", *(word for option in options.items() for word in option))
    settings = json.loads((tmp_path / "out" / "card.json").read_text())["settings"]
    asked = {"tokenizer": "bpe-280", "sources": [str(source)], "field": "body", "val_fraction": 0.3, "max_tokens": 9000}
    assert settings == asked | {"eot": None, "val_tokens": 0}
    call(
        "prepare",
        "text",
        "--source",
        source,
        "--out",
        tmp_path / "out",
        "--field",
        "body",
        "--seq-len",
        9,
        "--tokenizer",
        "bpe-280",
        "--force",
    )
    assert read_card(tmp_path / "out").seq_len == 9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prepare", "text"], "a text corpus needs --source"),
        (["prepare", "embedded", "--size", "nanno"], "unknown size 'nanno': did you mean 'nano'"),
        (["prepare", "embedded", "--tokenizer", "bpe2048"], "unknown tokenizer 'bpe2048'"),
        (["prepare", "embedded", "--seq-len", "many"], "--seq-len is 'many', no whole number: write it as 2000, 256k, 10M or 1.5B"),
        (["prepare", "embedded", "--max-tokens", "1.5"], "--max-tokens is '1.5', no whole number"),
        (["prepare", "embedded", "--max-tokens", "nan"], "--max-tokens is 'nan', no whole number"),
        (["prepare", "embedded", "--seq-len", "0"], "--seq-len is 0: it must be at least 1"),
        (["prepare", "embedded", "--source", "x.txt"], "the embedded corpus takes no --source"),
        (["verify", "nothing"], "unknown corpus 'nothing'"),
        (["info", "no/where"], "there is no corpus at no/where"),
    ],
)
def test_mistakes_are_one_line(call, root, words, message):
    with pytest.raises(UserError, match=message) as caught:
        call(*words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "number"), [("2000", 2000), ("256k", 256_000), ("10M", 10**7), ("1.5B", 1_500_000_000), ("1_000,000", 10**6)]
)
def test_counts(text, number):
    assert data._count(text, "--n", None) == number
