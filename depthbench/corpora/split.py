"""The held-out split: a document's own hash says on which side it lies, so identical documents lie on the same side."""

from __future__ import annotations

import hashlib
import math

import numpy as np

from depthbench.errors import UserError

SHARE = 0.05  # held out of a corpus that is looked at whole
SHARE_OF_MANY = 0.005  # held out of a longer one


def hash_of(document: bytes) -> float:
    """The SHA-256 of a document's text as a number in [0, 1); documents whose number is below the fraction are held out."""
    return (int.from_bytes(hashlib.sha256(document).digest()[:8]) >> 11) / 2**53


def blocks_for(predictions: int, block_length: int) -> int:
    """Blocks that hold at least so many predictions (and at least one block)."""
    return max(math.ceil(predictions / (block_length - 1)), 1)


def choose_fraction(
    hashes: list[float], lengths: list[int], *, block_length: int, predictions: int, fraction: float | None, whole: bool
) -> float:
    """The held-out fraction for documents of these hashes and lengths in tokens: the whole corpus, or its beginning.

    A given ``fraction`` stands. Otherwise the smallest of at least ``SHARE`` (``SHARE_OF_MANY``) that holds out ``predictions``.
    UserError where the corpus is too short for that.
    """
    total = sum(lengths)
    if total < block_length:
        short = f"the corpus has {total:,} tokens, fewer than one block of {block_length:,} (T + 1)"
        raise UserError(f"{short}: give more text, or a smaller --seq-len")
    if len(set(hashes)) < 2:
        raise UserError("the corpus is a single document, and the held-out split is made of whole documents: give more of them")
    needed = blocks_for(predictions, block_length) * block_length
    if 2 * needed > total:
        problem = f"holding out {needed:,} tokens would take more than half of the corpus's {total:,}"
        raise UserError(f"{problem}: give more text, or a smaller --val-tokens or --seq-len")
    if fraction is not None:
        return fraction
    order = np.argsort(hashes, kind="stable")
    reached = np.cumsum(np.asarray(lengths)[order])
    last = hashes[order[int(np.searchsorted(reached, needed))]]
    return max(SHARE if whole else SHARE_OF_MANY, float(np.nextafter(last, 1.0)))
