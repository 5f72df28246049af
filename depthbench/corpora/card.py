"""The card of a corpus: what is in it and how it was made. No torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from depthbench.corpora.location import located, open_folder
from depthbench.corpora.readers import reading
from depthbench.errors import UserError

CARD = "card.json"
TOKENIZER = "tokenizer.json"
SPLITS = ("train", "val")
FORMAT = 1


@dataclass(frozen=True)
class Chunk:
    """One chunk file, named relative to the corpus folder: how many whole blocks and bytes it holds, and their SHA-256."""

    file: str
    blocks: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Split:
    """Counts of one split. ``tokens_in`` includes the end-of-text token after each document; in = used + dropped.

    ``index_sha256`` is the ``digest_of_index`` of LitData's index; cards of older versions have none.
    """

    documents: int
    bytes: int
    tokens_in: int
    tokens_used: int
    tokens_dropped: int
    chunks: tuple[Chunk, ...]
    index_sha256: str = ""

    @property
    def blocks(self) -> int:
        return sum(chunk.blocks for chunk in self.chunks)


@dataclass(frozen=True)
class Settings:
    """What a user asked for: enough to write the same prepare command again."""

    tokenizer: str
    sources: tuple[str, ...] = ()
    field: str = "text"
    eot: str | None = None
    val_fraction: float | None = None
    val_tokens: int = 0
    max_tokens: int | None = None


@dataclass(frozen=True)
class Card:
    """What ``card.json`` says. Entropies are in nats per token; ``bytes`` count the documents' UTF-8 text.

    ``unigram_entropy`` is that of the training split's tokens; ``val_unigram_loss`` the cross entropy of the held-out predictions
    under the training split's unigram with one added to each count: the loss of a model that knows frequencies and nothing else.
    """

    corpus: str
    description: str
    settings: Settings
    request: str  # digest of the settings and of the source files' sizes: the same one need not be prepared again
    tokenizer: str
    tokenizer_sha256: str
    vocab_size: int
    eot_id: int
    block_length: int
    train: Split
    val: Split
    val_fraction: float  # documents whose hash, read as a number in [0, 1), is below it are held out
    unigram_entropy: float
    val_unigram_loss: float
    fingerprint: str
    created_at: str
    versions: dict[str, str]
    crosses_documents: bool = True  # documents are joined by the end-of-text token and the loss crosses them
    folder: Path | str = field(default=Path(), compare=False)  # where it was read from: a path, or a URL that LitData streams from

    @property
    def seq_len(self) -> int:
        """T: predictions per block, one fewer than its tokens."""
        return self.block_length - 1

    @property
    def documents(self) -> int:
        return self.train.documents + self.val.documents

    @property
    def bytes(self) -> int:
        return self.train.bytes + self.val.bytes

    @property
    def tokens_in(self) -> int:
        return self.train.tokens_in + self.val.tokens_in

    @property
    def tokens_used(self) -> int:
        return self.train.tokens_used + self.val.tokens_used

    @property
    def tokens_dropped(self) -> int:
        return self.train.tokens_dropped + self.val.tokens_dropped

    @property
    def blocks(self) -> dict[str, int]:
        return {name: self.split(name).blocks for name in SPLITS}

    def split(self, name: str) -> Split:
        return {"train": self.train, "val": self.val}[name]

    def to_json(self) -> str:
        """The text of ``card.json``; totals over both splits are written for readers, and recomputed when read."""
        fields = asdict(self)
        del fields["folder"]
        totals = ("documents", "bytes", "tokens_in", "tokens_used", "tokens_dropped", "blocks")
        fields = {"format": FORMAT, **{name: getattr(self, name) for name in totals}, **fields}
        return json.dumps(fields, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, folder: Path | str) -> Card:
        """Raises KeyError, TypeError or ValueError where the text is no card of this format."""
        fields = json.loads(text)
        if fields.pop("format") != FORMAT:
            raise ValueError("another format")
        for name in ("documents", "bytes", "tokens_in", "tokens_used", "tokens_dropped", "blocks"):
            del fields[name]
        for name in SPLITS:
            chunks = tuple(Chunk(**chunk) for chunk in fields[name]["chunks"])
            fields[name] = Split(**fields[name] | {"chunks": chunks})
        fields["settings"] = Settings(**fields["settings"] | {"sources": tuple(fields["settings"]["sources"])})
        return cls(**fields, folder=folder)


def fingerprint_of(tokenizer_sha256: str, block_length: int, splits: dict[str, Split]) -> str:
    """SHA-256 over what decides the data: the chunks' checksums in order, the tokenizer's hash and the block length."""
    decides = {
        "block_length": block_length,
        "tokenizer": tokenizer_sha256,
        "chunks": {name: [chunk.sha256 for chunk in splits[name].chunks] for name in SPLITS},
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def digest_of_index(index: dict) -> str:
    """SHA-256 over LitData's ``index.json``, which decides how chunks are read, but for the time it was written at."""
    decides = {name: value for name, value in index.items() if name != "updated_at"}
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def read_card(folder: Path | str) -> Card:
    """The card of a corpus folder, local or remote. UserError where there is none, or it cannot be read."""
    folder = located(folder)
    try:
        with reading(f"{folder}/{CARD}"):
            fs, path = open_folder(folder)
            try:
                text = fs.cat_file(f"{path}/{CARD}")
            except (FileNotFoundError, NotADirectoryError):
                text = None
        if text is None:
            problem = "is not a prepared corpus (it has no card.json)" if fs.exists(path) else "does not exist"
            raise UserError(f"corpus {folder} {problem}: make one with `depthbench data prepare`")
        return Card.from_json(text.decode(), folder)
    except (KeyError, TypeError, ValueError, AttributeError):
        problem = "is damaged, or of another version of depthbench"
        raise UserError(f"{folder}/{CARD} {problem}: run `depthbench data prepare` again, with --force") from None
