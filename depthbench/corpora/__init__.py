"""Text -> tokens -> LitData chunks of whole blocks, with a card that says what is in them.

    card = prepare("embedded", tokenizer="bpe-2048", block_length=257, out=Path("corpus"))
    folder = ensure("embedded", tokenizer="bpe-2048", seq_len=256)      # prepares where missing
    blocks = BlockDataset(folder, "train")                              # blocks[i]: LongTensor (257,)

docs/corpora.md has the layout of a corpus folder and the rules of the held-out split.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from depthbench.corpora.build import prepare
    from depthbench.corpora.card import Card, read_card
    from depthbench.corpora.compatible import check_compatible
    from depthbench.corpora.dataset import BlockDataset
    from depthbench.corpora.integrity import verify
    from depthbench.corpora.places import corpora_root, ensure

__all__ = ["BlockDataset", "Card", "check_compatible", "corpora_root", "ensure", "prepare", "read_card", "verify"]

# Resolved on first use: a card can be read without LitData (and so torch), tokenizers or pyarrow being imported.
_HOME = {
    "BlockDataset": "dataset",
    "Card": "card",
    "check_compatible": "compatible",
    "corpora_root": "places",
    "ensure": "places",
    "prepare": "build",
    "read_card": "card",
    "verify": "integrity",
}


def __getattr__(name: str):
    if name in _HOME:
        return getattr(import_module(f"depthbench.corpora.{_HOME[name]}"), name)
    raise AttributeError(f"module 'depthbench.corpora' has no attribute '{name}'")
