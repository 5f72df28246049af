"""One split's tokens, cut into blocks and written as LitData chunks of whole blocks.

A chunk holds one LitData item, its tokens; ``StreamingDataset(folder, item_loader=TokensLoader(block_length))`` reads it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from litdata import TokensLoader
from litdata.streaming.writer import BinaryWriter

from depthbench.corpora.card import Chunk, Split, digest_of_index

CHUNK_TOKENS = 2**24  # 32 MiB at 16 bits a token: small enough to fetch and shuffle, large enough to read fast


class _Writer(BinaryWriter):
    """LitData's writer, which also keeps the SHA-256 of what it writes, and is alone whatever process it runs in."""

    def __init__(self, folder: Path, chunk_tokens: int, block_length: int):
        super().__init__(str(folder), chunk_size=chunk_tokens, item_loader=TokensLoader(block_length))
        self._rank = 0  # a training process of any rank may prepare a corpus: it must not name chunks, or wait, by its rank
        self.sha256: dict[str, str] = {}

    def write_chunk_to_file(self, raw_data: bytes, filename: str, compress: bool | None = None) -> None:
        self.sha256[filename] = hashlib.sha256(raw_data).hexdigest()
        super().write_chunk_to_file(raw_data, filename, compress)

    def finish(self) -> dict:
        """Write what is left and index.json; returns that, which lists the chunks in order."""
        self.done()
        self._merge_no_wait()
        return json.loads(Path(self._cache_dir, "index.json").read_bytes())


class SplitWriter:
    """Takes a split's documents in order, one stream of tokens, and writes the whole blocks of it.

    ``counts`` (vocab_size,) are the occurrences of each id among the blocks' tokens, ``target_counts`` among their predictions
    (all but each block's first token).
    """

    def __init__(self, folder: Path, block_length: int, vocab_size: int, chunk_tokens: int = CHUNK_TOKENS):
        self._name, self._block_length = folder.name, block_length
        self._chunk_tokens = max(chunk_tokens // block_length, 1) * block_length
        self._writer = _Writer(folder, self._chunk_tokens, block_length)
        self._pending: list[np.ndarray] = []
        self._pending_tokens = 0
        self._chunks_written = 0
        self.documents = self.bytes = self.tokens_in = 0
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        self.target_counts = np.zeros(vocab_size, dtype=np.int64)

    def add(self, tokens: np.ndarray, n_bytes: int) -> None:
        """A document of ``n_bytes`` of text as ids, its end-of-text token included."""
        self.documents += 1
        self.bytes += n_bytes
        self.tokens_in += len(tokens)
        self._pending.append(tokens)
        self._pending_tokens += len(tokens)
        if self._pending_tokens >= self._chunk_tokens:
            self._write_whole(self._chunk_tokens)

    def close(self) -> Split:
        """Write the last blocks; the tail that fills no block is dropped."""
        self._write_whole(self._block_length)
        index = self._writer.finish()
        chunks = tuple(
            Chunk(
                file=f"{self._name}/{row['filename']}",
                blocks=row["dim"] // self._block_length,
                bytes=row["chunk_bytes"],
                sha256=self._writer.sha256[row["filename"]],
            )
            for row in index["chunks"]
        )
        used = self.tokens_in - self._pending_tokens
        return Split(self.documents, self.bytes, self.tokens_in, used, self._pending_tokens, chunks, digest_of_index(index))

    def _write_whole(self, unit: int) -> None:
        """Write the pending tokens that fill whole units, in chunks; the rest stays pending."""
        tokens = np.concatenate(self._pending) if self._pending else np.empty(0, dtype=np.uint16)
        whole = len(tokens) // unit * unit
        for start in range(0, whole, self._chunk_tokens):
            chunk = tokens[start : min(start + self._chunk_tokens, whole)]
            self._writer.add_item(self._chunks_written, chunk)
            self._chunks_written += 1
            self._count(chunk.reshape(-1, self._block_length))
        self._pending = [tokens[whole:].copy()]
        self._pending_tokens = len(tokens) - whole

    def _count(self, blocks: np.ndarray) -> None:
        at_once = max(2**20 // self._block_length, 1)  # bincount makes 64-bit copies
        for start in range(0, len(blocks), at_once):
            some = blocks[start : start + at_once]
            self.counts += np.bincount(some.ravel(), minlength=len(self.counts))
            self.target_counts += np.bincount(some[:, 1:].ravel(), minlength=len(self.counts))


def unigram_entropy(counts: np.ndarray) -> float:
    """Entropy in nats per token of the distribution behind counts (vocab_size,)."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def unigram_loss(counts: np.ndarray, target_counts: np.ndarray) -> float:
    """Cross entropy in nats per prediction of targets under the unigram of ``counts`` with one added to each; both (vocab_size,)."""
    q = (counts + 1) / (counts.sum() + len(counts))
    return float(-(target_counts * np.log(q)).sum() / target_counts.sum())
