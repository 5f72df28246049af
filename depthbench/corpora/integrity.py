"""Whether a corpus folder still holds what its card says. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

from depthbench.corpora.card import CARD, SPLITS, TOKENIZER, Card, digest_of_index, fingerprint_of, read_card
from depthbench.corpora.compatible import prepare_again
from depthbench.corpora.location import open_folder
from depthbench.errors import UserError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


def check_files(card: Card, splits: Iterable[str] = SPLITS) -> None:
    """The quick check, before any token is read: every chunk is there at its full size, and LitData's index is as it was written.

    UserError that names the file and the prepare command.
    """
    fs, root = open_folder(card.folder)
    for name in splits:
        split = card.split(name)
        chunks = split.chunks
        sizes = _sizes(fs, f"{root}/{name}")
        for chunk in chunks:
            size = sizes.get(PurePosixPath(chunk.file).name)
            if size is None:
                raise damaged(card, chunk.file, "is missing")
            if size != chunk.bytes:
                raise damaged(card, chunk.file, f"has {size:,} bytes in place of {chunk.bytes:,}")
        try:
            index = json.loads(fs.cat_file(f"{root}/{name}/index.json"))
            rows = [(f"{name}/{row['filename']}", row["dim"], row["chunk_bytes"]) for row in index["chunks"]]
            digest = digest_of_index(index)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise damaged(card, f"{name}/index.json", "is missing or damaged") from None
        if rows != [(chunk.file, chunk.blocks * card.block_length, chunk.bytes) for chunk in chunks]:
            raise damaged(card, f"{name}/index.json", "does not list the chunks of card.json")
        if split.index_sha256 not in ("", digest):
            raise damaged(card, f"{name}/index.json", "is damaged (its content does not match its checksum)")


def verify(folder: Path | str) -> Card:
    """The slow check: every byte against its checksum, and the card against itself. UserError that names the first bad file."""
    card = read_card(folder)
    check_files(card)
    fs, root = open_folder(card.folder)
    expected = {TOKENIZER: card.tokenizer_sha256}
    for name in SPLITS:
        expected |= {chunk.file: chunk.sha256 for chunk in card.split(name).chunks}
    for file, sha256 in expected.items():
        try:
            with fs.open(f"{root}/{file}", "rb") as stream:
                found = _sha256(stream)
        except OSError as error:
            raise damaged(card, file, f"cannot be read ({error.strerror or error})") from None
        if found != sha256:
            raise damaged(card, file, "is damaged (its bytes do not match their checksum)")
    splits = {name: card.split(name) for name in SPLITS}
    if card.fingerprint != fingerprint_of(card.tokenizer_sha256, card.block_length, splits):
        raise damaged(card, CARD, "does not match its own fingerprint")
    return card


def damaged(card: Card, file: str, problem: str) -> UserError:
    """The error for a file of the corpus folder that is not as it was written."""
    return UserError(f"corpus file {card.folder}/{file} {problem}: run `{prepare_again(card)}`")


def _sizes(fs: AbstractFileSystem, folder: str) -> dict[str, int]:
    try:
        return {PurePosixPath(info["name"]).name: info["size"] for info in fs.ls(folder, detail=True)}
    except FileNotFoundError:
        return {}


def _sha256(stream: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while data := stream.read(1 << 20):
        digest.update(data)
    return digest.hexdigest()
