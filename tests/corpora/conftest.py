"""Small corpora of made-up words, the same on every run."""

from __future__ import annotations

import json
import random

import pytest

from depthbench.corpora import prepare

TOKENIZER = "bpe-300"
BLOCK = 17


def made_up_documents(count: int, seed: int = 0, words: int = 60) -> list[str]:
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(400)] + ["naïve", "北京", "🙂"]
    return [" ".join(rng.choices(vocabulary, k=rng.randint(1, words))) + "\n" for _ in range(count)]


def write_jsonl(path, documents, field="text"):
    path.write_text("".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(documents)), "utf-8")
    return path


@pytest.fixture(scope="session")
def documents() -> list[str]:
    return made_up_documents(300)


@pytest.fixture(scope="session")
def jsonl(tmp_path_factory, documents):
    return write_jsonl(tmp_path_factory.mktemp("source") / "documents.jsonl", documents)


@pytest.fixture(scope="session")
def ready(tmp_path_factory, jsonl):
    """A prepared corpus of several chunks. Not to be written to: see `copy`."""
    out = tmp_path_factory.mktemp("corpora") / "ready"
    return prepare(
        "text", tokenizer=TOKENIZER, block_length=BLOCK, out=out, sources=[str(jsonl)], val_fraction=0.2, chunk_tokens=1000, progress=False
    )


@pytest.fixture
def copy(ready, tmp_path):
    """The folder of a corpus that may be damaged."""
    import shutil

    return shutil.copytree(ready.folder, tmp_path / "copy")
