"""Shared by all tests: a corpus small enough to prepare in a second, and the command line as a user calls it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent

# Two test processes share two cores: threads of their own would only wait for each other. Read when torch is first imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def corpora_of_their_own(tmp_path_factory, monkeypatch):
    """No test reads or writes the user's prepared corpora."""
    monkeypatch.setenv("DEPTHBENCH_DATA", str(tmp_path_factory.getbasetemp() / "corpora"))


@pytest.fixture(autouse=True)
def main_module_of_its_own():
    """Streamlit's AppTest leaves its script as ``__main__``, which processes spawned by a later test would run again."""
    before = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = before


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory) -> Path:
    """A prepared text corpus for size pico: vocabulary 512, blocks of 128 + 1 tokens, some hundred blocks."""
    return text_corpus(tmp_path_factory, texts=60)


def text_corpus(tmp_path_factory, *, texts: int) -> Path:
    """A prepared corpus of so many made-up texts, about 20 training blocks of 128 + 1 tokens and 5 held-out ones from each."""
    from depthbench import corpora

    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(400)]
    source = tmp_path_factory.mktemp("text")
    for number in range(texts):
        sentences = (" ".join(rng.choices(words, weights=range(400, 0, -1), k=rng.randint(4, 14))) for _ in range(90))
        (source / f"{number:02d}.txt").write_text(".\n".join(sentences), encoding="utf-8")
    folder = tmp_path_factory.mktemp("corpus") / "tiny"
    corpora.prepare(
        "text", tokenizer="bpe-512", block_length=129, out=folder, sources=[str(source / "*.txt")], val_fraction=0.2, progress=False
    )
    return folder


@pytest.fixture
def depthbench():
    """Runs ``python -m depthbench …`` as a user would, in a process of its own; returns the completed process."""

    def call(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), **environment}
        command = [sys.executable, "-m", "depthbench", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, timeout=240)

    return call


@pytest.fixture
def says(capsys):
    """Runs a command line in this process; returns (exit code, standard output, standard error)."""
    from depthbench.cli import main

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call
