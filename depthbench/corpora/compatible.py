"""Whether a run can use a corpus, and the prepare command that mends it where not. No torch."""

from __future__ import annotations

import hashlib
import re
import shlex
from dataclasses import replace
from pathlib import Path

from depthbench.corpora.card import Card, Settings
from depthbench.errors import UserError

SMALLEST_BPE = 257  # one token per byte and the end-of-text token


def prepare_command(corpus: str, settings: Settings, seq_len: int, *, out: Path | None = None, force: bool = False) -> str:
    """The shell command that prepares this corpus. Without ``out`` it goes to its usual place."""
    words = ["depthbench", "data", "prepare", corpus]
    if settings.sources or corpus == "text":
        words += ["--source", *(settings.sources or ["FILE"])]
    words += ["--tokenizer", settings.tokenizer, "--seq-len", str(seq_len)]
    usual = Settings(tokenizer=settings.tokenizer)
    for name in ("field", "eot", "val_fraction", "val_tokens", "max_tokens"):
        if getattr(settings, name) != getattr(usual, name):
            words += ["--" + name.replace("_", "-"), str(getattr(settings, name))]
    words += ["--out", str(out)] if out else []
    words += ["--force"] if force else []
    return shlex.join(words)


def prepare_again(card: Card, *, seq_len: int | None = None, **changes) -> str:
    """The command that prepares a card's corpus with some settings changed: into its folder anew, unless T or tokenizer change."""
    seq_len = card.seq_len if seq_len is None else seq_len
    settings = replace(card.settings, **changes)
    same_place = (settings.tokenizer, seq_len) == (card.settings.tokenizer, card.seq_len)
    same_place = same_place and isinstance(card.folder, Path)
    out = card.folder.absolute() if same_place else None
    return prepare_command(card.corpus, settings, seq_len, out=out, force=same_place)


def check_compatible(card: Card, *, vocab_size: int, seq_len: int, tokenizer: str | None = None, val_tokens: int | None = None) -> None:
    """Refuse, before training, a corpus that does not fit the run; the message holds the prepare command that mends it.

    ``vocab_size``: rows of the model's embedding. ``seq_len``: T, predictions per block. ``tokenizer``: the one the run asks for, as
    "bpe-2048", "olmo", the path of a tokenizer.json, or the SHA-256 of one. ``val_tokens``: held-out predictions of one validation.
    """
    where = f"corpus {card.folder}"
    if tokenizer is not None and not _is_its_tokenizer(card, tokenizer):
        mend = "use the corpus that the model was trained with"
        if not re.fullmatch(r"[0-9a-f]{64}", tokenizer):
            mend = f"run `{prepare_again(card, tokenizer=tokenizer, seq_len=seq_len)}`"
        raise UserError(f"{where} was made with the tokenizer {card.tokenizer}, the run asks for {tokenizer}: {mend}")
    if card.seq_len != seq_len:
        mend = prepare_again(card, seq_len=seq_len)
        raise UserError(f"{where} holds blocks of T = {card.seq_len} predictions, the run asks for T = {seq_len}: run `{mend}`")
    if card.vocab_size > vocab_size:
        problem = f"{where}: its tokenizer {card.tokenizer} has {card.vocab_size:,} tokens, the model's vocabulary only {vocab_size:,}"
        mend = prepare_again(card, tokenizer=f"bpe-{max(vocab_size, SMALLEST_BPE)}")
        raise UserError(f"{problem}: give the model a larger vocabulary, or run `{mend}`")
    held_out = card.val.blocks * card.seq_len
    if val_tokens is not None and held_out < val_tokens:
        mend = prepare_again(card, val_tokens=val_tokens, val_fraction=None)
        raise UserError(f"{where} holds out {held_out:,} predictions, the run validates on {val_tokens:,}: run `{mend}`")


def _is_its_tokenizer(card: Card, asked: str) -> bool:
    if Path(asked).is_file():
        return hashlib.sha256(Path(asked).read_bytes()).hexdigest() == card.tokenizer_sha256
    return asked in (card.tokenizer, card.settings.tokenizer, card.tokenizer_sha256)
