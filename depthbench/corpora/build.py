"""Text to a corpus folder: read, tokenise, split by document hash, cut into blocks, write beside, rename into place."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import chain
from pathlib import Path

from tqdm import tqdm

from depthbench import __version__
from depthbench.corpora.card import CARD, SPLITS, TOKENIZER, Card, Settings, Split, fingerprint_of, read_card
from depthbench.corpora.chunks import CHUNK_TOKENS, SplitWriter, unigram_entropy, unigram_loss
from depthbench.corpora.integrity import check_files
from depthbench.corpora.sources import Source, open_source
from depthbench.corpora.split import blocks_for, choose_fraction
from depthbench.corpora.staging import locked, staged, write_errors
from depthbench.corpora.tokenise import Document, tokenised
from depthbench.corpora.tokenizers import absolute_name, load_tokenizer, serial_tokenizers
from depthbench.errors import UserError

PROBE = 2**25  # tokens looked at before the held-out fraction is fixed


def prepare(
    corpus: str,
    *,
    tokenizer: str,
    block_length: int,
    out: Path | str,
    sources: Iterable[str] = (),
    field: str = "text",
    eot: str | None = None,
    val_fraction: float | None = None,
    val_tokens: int = 0,
    max_tokens: int | None = None,
    workers: int | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    force: bool = False,
    progress: bool = True,
) -> Card:
    """Make the corpus folder ``out``; its card. The same call again finds it made and changes nothing.

    ``corpus``: "embedded", "text" or "fineweb-edu", with ``sources`` and ``field`` as in ``open_source``.
    ``tokenizer``: "bpe-N", "olmo" or the path of a tokenizer.json (``eot`` names its end-of-text token).
    ``block_length``: T + 1 tokens, of which T are predicted; also the stride.
    ``val_fraction``: held-out share of the documents; None: the smallest of at least 5 % (0.5 % of a long corpus) that holds out
    ``val_tokens`` predictions. ``max_tokens``: stop after the document that reaches it.
    ``workers``: threads that tokenise; they do not change the result. ``chunk_tokens``: size of a chunk at most.
    ``force``: replace a corpus that was made otherwise.

    UserError for what a user can mend. A call that fails or is killed leaves no folder that looks whole.
    """
    out = Path(out).expanduser()
    _check_numbers(block_length, val_fraction, val_tokens, max_tokens, workers)
    source = open_source(corpus, sources, field)
    settings = Settings(absolute_name(tokenizer), source.asked, field, eot, val_fraction, val_tokens, max_tokens)
    request = _digest([asdict(settings), source.digest(), block_length, chunk_tokens])
    with write_errors(out), locked(out):
        if card := _already_there(out, request, force):
            return card
        with staged(out) as folder, serial_tokenizers(), _progress_bar(source, progress) as bar:
            card = _build(folder, source, settings, block_length, chunk_tokens, workers, request, bar)
            (folder / CARD).write_text(card.to_json(), "utf-8")
    return read_card(out)


def _build(
    folder: Path,
    source: Source,
    settings: Settings,
    block_length: int,
    chunk_tokens: int,
    workers: int | None,
    request: str,
    bar: tqdm,
) -> Card:
    """Write the tokenizer and the chunks into ``folder``; their card."""
    if next(source.documents(), None) is None:
        raise UserError(f"the corpus is empty: no document of {source.description} holds text")
    bar.set_description("tokenizer")
    tokenizer = load_tokenizer(settings.tokenizer, source, settings.eot)
    (folder / TOKENIZER).write_bytes(tokenizer.json)
    bar.set_description("tokens")
    bar.reset()
    documents = tokenised(source, tokenizer, workers=workers, max_tokens=settings.max_tokens, bar=bar)
    writers = {name: SplitWriter(folder / name, block_length, tokenizer.vocab_size, chunk_tokens) for name in SPLITS}
    val_fraction = _write(documents, writers, settings, block_length)
    splits = {name: writer.close() for name, writer in writers.items()}
    _check_splits(splits, settings, block_length)
    return Card(
        corpus=source.corpus,
        description=source.description,
        settings=settings,
        request=request,
        tokenizer=tokenizer.name,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eot_id=tokenizer.eot_id,
        block_length=block_length,
        **splits,
        val_fraction=val_fraction,
        unigram_entropy=unigram_entropy(writers["train"].counts),
        val_unigram_loss=unigram_loss(writers["train"].counts, writers["val"].target_counts),
        fingerprint=fingerprint_of(tokenizer.sha256, block_length, splits),
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"depthbench": __version__, "python": platform.python_version()}
        | {package: version(package) for package in ("litdata", "tokenizers", "numpy")},
    )


def _write(documents: Iterator[Document], writers: dict[str, SplitWriter], settings: Settings, block_length: int) -> float:
    """Send each document to its split; the held-out fraction. The first ``PROBE`` tokens wait until it is chosen."""
    first, tokens = [], 0
    for document in documents:
        first.append(document)
        tokens += len(document.tokens)
        if tokens >= PROBE:
            break
    fraction = choose_fraction(
        [document.hash for document in first],
        [len(document.tokens) for document in first],
        block_length=block_length,
        predictions=settings.val_tokens,
        fraction=settings.val_fraction,
        whole=tokens < PROBE,
    )
    for document in chain(first, documents):
        writers["val" if document.hash < fraction else "train"].add(document.tokens, document.bytes)
    return fraction


def _check_splits(splits: dict[str, Split], settings: Settings, block_length: int) -> None:
    """Each split holds a block, and the held-out one as many predictions as were asked."""
    needed = {"train": 1, "val": blocks_for(settings.val_tokens, block_length)}
    for name, blocks in needed.items():
        if (split := splits[name]).blocks < blocks:
            have = f"{split.documents} documents with {split.tokens_in:,} tokens, fewer than {blocks:,} blocks of {block_length:,}"
            raise UserError(f"the {name} split holds {have}: give more documents, or change --val-fraction or --val-tokens")


def _already_there(out: Path, request: str, force: bool) -> Card | None:
    """The card of a whole corpus made by the same request; None where ``out`` may be written; UserError where it may not."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not (out / CARD).is_file():
        raise UserError(f"{out} exists and is not a corpus: choose another place with --out")
    if force:
        return None
    try:
        card = read_card(out)
        if card.request == request:
            check_files(card)
    except UserError:
        return None  # damaged: made again
    if card.request != request:
        made = f"T = {card.seq_len}, tokenizer {card.tokenizer}, {card.description}"
        raise UserError(f"{out} holds a corpus made otherwise ({made}): add --force to replace it, or choose another --out")
    return card


def _check_numbers(block_length: int, val_fraction: float | None, val_tokens: int, max_tokens: int | None, workers: int | None) -> None:
    for name, value, least in (
        ("--seq-len", block_length - 1, 1),
        ("--val-tokens", val_tokens, 0),
        ("--max-tokens", max_tokens, 1),
        ("--workers", workers, 1),
    ):
        if value is not None and value < least:
            raise UserError(f"{name} is {value}: it must be at least {least}")
    if val_fraction is not None and not 0 < val_fraction < 1:
        raise UserError(f"--val-fraction is {val_fraction}: it must lie between 0 and 1")


def _digest(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _progress_bar(source: Source, progress: bool) -> tqdm:
    return tqdm(total=source.size, disable=not progress, bar_format="{l_bar}{bar}| {elapsed}<{remaining}{postfix}")
