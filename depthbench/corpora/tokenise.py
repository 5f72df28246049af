"""Documents to token ids, in order, by threads."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from depthbench.corpora.sources import Source
from depthbench.corpora.split import hash_of
from depthbench.corpora.tokenizers import CorpusTokenizer

BATCH = 2**18  # characters that one thread takes at a time


class Document(NamedTuple):
    """``hash`` in [0, 1) decides its split, ``bytes`` of UTF-8 text, ``tokens`` with the end-of-text token last."""

    hash: float
    bytes: int
    tokens: np.ndarray


def tokenised(source: Source, tokenizer: CorpusTokenizer, *, workers: int | None, max_tokens: int | None, bar: tqdm) -> Iterator[Document]:
    """The source's documents in its order, up to and with the one that reaches ``max_tokens``; ``bar`` follows.

    ``workers`` threads (default: one per core) tokenise side by side, as the library lets go of the GIL.
    """
    total = text = 0
    with contextlib.closing(_in_order(source, tokenizer, workers or _cores())) as batches:
        for documents, position in batches:
            text += sum(document.bytes for document in documents)
            elapsed = max(bar.format_dict["elapsed"], 1e-3)
            bar.set_postfix_str(f"{text / 1e6:,.1f} MB of text, {text / 1e6 / elapsed:.1f} MB/s", refresh=False)
            bar.update(position - bar.n)
            for document in documents:
                yield document
                total += len(document.tokens)
                if max_tokens is not None and total >= max_tokens:
                    return


def _in_order(source: Source, tokenizer: CorpusTokenizer, workers: int) -> Iterator[tuple[list[Document], int]]:
    """(documents, bytes of source read) per batch; a few batches per thread are under way at a time."""

    def encode(texts: list[str]) -> list[Document]:
        raw = [text.encode() for text in texts]
        return [Document(hash_of(b), len(b), ids) for b, ids in zip(raw, tokenizer.encode(texts), strict=True)]

    under_way: deque = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for texts, position in _batches(source.documents()):
            under_way.append((pool.submit(encode, texts), position))
            if len(under_way) > 2 * workers:
                future, position = under_way.popleft()
                yield future.result(), position
        for future, position in under_way:
            yield future.result(), position
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(documents: Iterable[tuple[str, int]]) -> Iterator[tuple[list[str], int]]:
    texts, length, position = [], 0, 0
    for text, position in documents:  # noqa: B007 (the last position is used after the loop)
        texts.append(text)
        length += len(text)
        if length >= BATCH:
            yield texts, position
            texts, length = [], 0
    if texts:
        yield texts, position


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
