"""Which training sequences each optimizer step sees, and the LightningDataModule that serves them.

The order is a pure function of (seed, step): one endless stream of sequences, a pass over the corpus at a time. A pass visits the
LitData chunks in shuffled order and the blocks of a chunk in shuffled order, so that a remote chunk is fetched once a pass. Step s
reads positions [s * S, (s + 1) * S) of that stream, S sequences a step, whatever the number of workers, ranks or micro-batches:
changing those changes no training result, and a resumed run needs to know nothing but its step.

Lightning sees the whole run as a single epoch. Gradient accumulation is therefore never cut short at the end of a corpus pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler, Subset

from depthbench.corpora import BlockDataset
from depthbench.errors import UserError


def corpus_pass(chunk_sizes: Sequence[int], *, seed: int, index: int) -> np.ndarray:
    """Block ids in the order in which pass ``index`` (from 0) over the corpus visits them, shape (blocks,)."""
    rng = np.random.default_rng([seed, index])
    starts = np.concatenate([[0], np.cumsum(chunk_sizes)[:-1]])
    return np.concatenate([starts[c] + rng.permutation(chunk_sizes[c]) for c in rng.permutation(len(chunk_sizes))])


class StepSampler(Sampler[list[int]]):
    """Yields the block ids of each micro-batch of one rank, from micro-batch ``start`` to the end of the plan.

    ``len()`` is the length of the whole plan, also after a resume: Lightning compares it with its own batch counter.
    """

    def __init__(
        self, chunk_sizes: Sequence[int], *, seed: int, steps: int, micro_batch: int, accumulation: int, rank: int = 0, world_size: int = 1
    ):
        self.chunk_sizes = list(chunk_sizes)
        self.seed, self.steps, self.micro_batch, self.accumulation = seed, steps, micro_batch, accumulation
        self.rank, self.world_size = rank, world_size
        self.start_step = 0

    def __len__(self) -> int:
        return self.steps * self.accumulation

    def step_blocks(self, step: int) -> list[int]:
        """Block ids of optimizer step ``step`` (from 0), over all ranks and micro-batches."""
        size, blocks = self.micro_batch * self.accumulation * self.world_size, sum(self.chunk_sizes)
        positions = range(step * size, (step + 1) * size)
        return [int(self._pass(position // blocks)[position % blocks]) for position in positions]

    def _pass(self, index: int) -> np.ndarray:
        if getattr(self, "_cached", (None,))[0] != index:
            self._cached = (index, corpus_pass(self.chunk_sizes, seed=self.seed, index=index))
        return self._cached[1]

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.start_step, self.steps):
            mine = self.step_blocks(step)[self.rank :: self.world_size]
            for micro in range(self.accumulation):
                yield mine[micro * self.micro_batch : (micro + 1) * self.micro_batch]


class BlockLoader(DataLoader):
    """A DataLoader that Lightning may resume in the middle: its position is the trainer's step, so it has no state of its own."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        try:
            yield from super().__iter__()
        except UserError as error:  # from a loader process torch hands it over with that process's traceback in front
            raise UserError(str(error).rpartition("UserError: ")[2].strip()) from None

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


class CorpusDataModule(L.LightningDataModule):
    """Serves blocks of T + 1 token ids, LongTensor (sequences, T + 1), from a prepared corpus folder.

    The validation loader yields the same ``val_blocks`` first held-out blocks in the same order for every shape and design.
    """

    def __init__(
        self,
        corpus: str | Path,
        *,
        seed: int,
        steps: int,
        micro_batch: int,
        accumulation: int,
        val_blocks: int,
        val_batch: int | None = None,
        workers: int = 0,
        cache_dir: str | Path | None = None,
    ):
        super().__init__()
        self.corpus, self.cache_dir = corpus, cache_dir
        self.seed, self.steps, self.micro_batch, self.accumulation = seed, steps, micro_batch, accumulation
        self.val_blocks, self.val_batch, self.workers = val_blocks, val_batch or micro_batch, workers

    def train_dataloader(self) -> DataLoader:
        dataset = BlockDataset(self.corpus, "train", cache_dir=self.cache_dir)
        sampler = StepSampler(
            dataset.chunk_sizes,
            seed=self.seed,
            steps=self.steps,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            rank=self.trainer.global_rank if self.trainer else 0,
            world_size=self.trainer.world_size if self.trainer else 1,
        )
        sampler.start_step = self.trainer.global_step if self.trainer else 0
        return self._loader(dataset, batch_sampler=sampler)

    def val_dataset(self) -> Subset:
        """The fixed held-out blocks."""
        held_out = BlockDataset(self.corpus, "val", cache_dir=self.cache_dir)
        return Subset(held_out, range(min(self.val_blocks, len(held_out))))

    def val_dataloader(self) -> DataLoader:
        dataset = self.val_dataset()
        if self.trainer and self.trainer.world_size > 1:
            dataset = Subset(dataset, range(self.trainer.global_rank, len(dataset), self.trainer.world_size))
        return self._loader(dataset, batch_size=self.val_batch)

    def _loader(self, dataset, **how) -> DataLoader:
        return BlockLoader(
            dataset,
            num_workers=self.workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.workers > 0,
            multiprocessing_context="spawn" if self.workers else None,
            generator=torch.Generator(),  # its own: else each pass draws a seed for the workers from the run's random numbers
            **how,
        )
