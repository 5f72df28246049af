"""Random access to a corpus's blocks, for a map-style loader with a sampler of its own."""

from __future__ import annotations

import os
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import torch
from litdata import StreamingDataset, TokensLoader
from torch.utils.data import Dataset

from depthbench.corpora.card import SPLITS, read_card
from depthbench.corpora.integrity import check_files, damaged
from depthbench.errors import UserError, unknown


class BlockDataset(Dataset):
    """The blocks of one split ("train" or "val") of a corpus folder, local or remote, in the order they were written.

    ``blocks[i]`` is a LongTensor (T + 1,), read through LitData's StreamingDataset and TokensLoader. Chunks are checked for their
    size on opening and every id against the vocabulary on reading; a UserError names the file. Instances can be pickled and
    forked: each process opens the chunks for itself.

    ``chunk_sizes``: blocks in each chunk, in order, for a sampler that shuffles chunk by chunk.
    ``cache_dir``: where the chunks of a remote folder are kept, best one per run; those of a local one are read in place.
    """

    def __init__(self, folder: Path | str, split: str, *, cache_dir: Path | str | None = None):
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        self.card = read_card(folder)
        check_files(self.card, [split])
        self._chunks = self.card.split(split).chunks
        folder = self.card.folder
        self._address = folder.absolute() / split if isinstance(folder, Path) else f"{folder}/{split}"
        self._cache_dir = str(cache_dir) if cache_dir else None
        self.chunk_sizes = [chunk.blocks for chunk in self._chunks]
        self._ends = list(accumulate(self.chunk_sizes))
        self._stream: StreamingDataset | None = None
        self._process = 0

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> torch.Tensor:
        index = int(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        index %= len(self)
        try:
            ids = self._open()[index]
        except (OSError, RuntimeError) as error:  # LitData's, after it has waited for a chunk or tried to fetch it in vain
            why = (str(error.__cause__ or error) or type(error).__name__).splitlines()[0].partition(". ")[0]
            problem = f"corpus file {self.file_of(index)} cannot be read ({why})"
            raise UserError(f"{problem}: see whether its disk or network answers, and repeat the command") from error
        if ids.max() >= self.card.vocab_size or ids.min() < 0:
            raise damaged(self.card, self._file(index), f"holds a token id beyond the vocabulary's {self.card.vocab_size:,}")
        return torch.from_numpy(ids.astype("int64"))

    def file_of(self, index: int) -> str:
        """Path or URL of the chunk file that holds block ``index`` (from 0)."""
        return f"{self.card.folder}/{self._file(index)}"

    def _file(self, index: int) -> str:
        return self._chunks[bisect_right(self._ends, index)].file

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_stream": None, "_process": 0}

    def _open(self) -> StreamingDataset:
        if self._stream is None or self._process != os.getpid():
            loader = TokensLoader(block_size=self.card.block_length)
            self._stream = StreamingDataset(self._address, cache_dir=self._cache_dir, item_loader=loader)
            self._process = os.getpid()
        return self._stream
