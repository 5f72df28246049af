"""Which training sequences each optimizer step sees, and the LightningDataModule that serves them.

The order is a pure function of (seed, step): one endless stream of sequences, a pass over the corpus at a time. A pass visits the
LitData chunks in shuffled order and the blocks of a chunk in shuffled order, so that a remote chunk is fetched once a pass. Step s
reads positions [s * S, (s + 1) * S) of that stream, S sequences a step, whatever the number of workers, ranks or micro-batches:
changing those changes no training result, and a resumed run needs to know nothing but its step.

Lightning sees the whole run as a single epoch. Gradient accumulation is therefore never cut short at the end of a corpus pass.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import count, islice
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import TIMEOUT_MAX, Thread, current_thread, main_thread
from typing import Any

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

from depthbench.corpora import BlockDataset
from depthbench.errors import UserError
from depthbench.training.plan import Experiment


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
        if steps < 1 or sum(chunk_sizes) < 1:
            found = f"{steps} steps on {sum(chunk_sizes)} training blocks"
            raise UserError(f"{found} make no batch: ask for more --tokens, or prepare more text")
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
    """A DataLoader that waits for a batch no longer than ``timeout_s`` seconds (0: for ever), and that Lightning may resume in the middle.

    Its position is the trainer's step, so it has no state of its own. The batches are those of a DataLoader, each drawn when it is
    asked for, in a thread: so the main thread can stop waiting whatever holds up a read, and obeys signals while it waits.

    Raises UserError in one line: where no batch arrives in time, naming the chunks and blocks; where a loader process was killed;
    and what the dataset raises, in a loader process too.
    """

    def __init__(self, dataset: Dataset, *, timeout_s: float = 0, **how):
        super().__init__(dataset, **how)
        self.timeout_s = timeout_s

    def __iter__(self) -> Iterator[torch.Tensor]:
        reader = _Reader(super().__iter__, torch.accelerator.current_device_index() if self.pin_memory else None)
        try:
            for number in count():
                batch = self._next(reader, number)
                if batch is _END:
                    return
                yield batch
        finally:
            reader.leave()

    def _next(self, reader: _Reader, number: int) -> Any:
        try:
            return reader.next(self.timeout_s)
        except UserError as error:  # from a loader process torch hands it over with that process's traceback in front
            raise UserError(str(error).rpartition("UserError: ")[2].strip()) from None
        except (Empty, RuntimeError, OSError, EOFError) as error:  # the last two where a process ended amid what it was handing over
            ended = [process for process in reader.processes if process.exitcode is not None]
            if ended:
                raise UserError(killed(ended[0], self.num_workers)) from None
            if isinstance(error, Empty):
                raise UserError(self._overdue(number)) from None
            raise

    def _overdue(self, number: int) -> str:
        """What to say where batch ``number`` (from 0) of an iteration does not come."""
        blocks, dataset = next(islice(self.batch_sampler, number, None), []), self.dataset
        while isinstance(dataset, Subset):
            blocks, dataset = [dataset.indices[block] for block in blocks], dataset.dataset
        files = listed(dict.fromkeys(map(dataset.file_of, blocks)), 3)
        reading = f"{self.num_workers} loader processes (--workers)" if self.num_workers else "no loader processes (--workers 0)"
        return (
            f"no batch in {self.timeout_s:g} s, with {reading}: blocks {listed(blocks, 8)} of {files} did not arrive; see whether the disk "
            "or network they lie on answers, or raise --loader-timeout; a run goes on from its last checkpoint when its command is repeated"
        )

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


_END = object()


class _Reader(Thread):
    """Draws from an iterator in a thread of its own, one item whenever one is asked for; ``leave`` it when no more are wanted.

    The iterator is made in the thread too, which keeps torch from raising the death of a loader process wherever the main thread
    happens to stand: it is met when a batch of that process is waited for. ``device`` is the index of the accelerator to pin for.
    """

    def __init__(self, iterate: Callable[[], Iterator], device: int | None):
        super().__init__(name="depthbench batches", daemon=True)  # a read that hangs must not keep the process from ending
        self._iterate, self._device = iterate, device
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._answered = True
        self.processes: Sequence = ()
        self.start()

    def run(self) -> None:
        # Loader processes inherit this: Ctrl-C in a terminal reaches them too, and the step that is to be finished needs them.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            if self._device is not None:
                torch.accelerator.set_device_index(self._device)  # each thread has its own, at first 0
            items = self._iterate()
            self.processes = getattr(items, "_workers", ())
            while self._asked.get():
                self._answers.put(next(items, _END))
        except BaseException as error:
            self._answers.put(error)

    def next(self, timeout_s: float) -> Any:
        """The next item, or ``_END``. Raises what the iterator raises, and Empty after ``timeout_s`` seconds (0: never)."""
        self._answered = False
        self._asked.put(True)
        answer = self._answers.get(timeout=min(timeout_s, TIMEOUT_MAX) or None)
        if isinstance(answer, BaseException):
            try:
                raise answer
            finally:
                del answer  # its traceback holds this frame: together they would keep the loader
        self._answered = True
        return answer

    def leave(self) -> None:
        """Let the thread end, at once or when its read comes back. It is not joined: a hanging one would never be."""
        self._asked.put(False)
        if not self._answered:
            kill(self.processes)  # whoever ends a loader waits for its processes, and a hanging one does not end by itself


def kill(processes: Sequence[BaseProcess]) -> None:
    """Kill loader processes. Torch, where another loader of this program has set its handler, would raise that anywhere in the main
    thread; of a process that is waited for already it knows nothing more."""
    in_main_thread = current_thread() is main_thread()
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL) if in_main_thread else None
    try:
        for process in processes:
            process.kill()
        for process in processes:
            process.join(timeout=5)  # one that the disk it reads from holds up does not even end now
    finally:
        if in_main_thread:
            signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)


def killed(process: BaseProcess, count: int) -> str:
    """What to say of a loader process, one of ``count``, that has ended."""
    code = process.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return (
        f"loader process {process.pid} of {count} {how}: where memory or /dev/shm is short, use fewer --workers (0: none); "
        "a run goes on from its last checkpoint when its command is repeated"
    )


def listed(items: Collection, at_most: int) -> str:
    """The first ``at_most`` items, and how many more there are."""
    more = f" and {len(items) - at_most} more" if len(items) > at_most else ""
    return ", ".join(map(str, islice(items, at_most))) + more


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
        loader_timeout: float = Experiment.loader_timeout,
        cache_dir: str | Path | None = None,
    ):
        super().__init__()
        self.corpus, self.cache_dir = corpus, cache_dir
        self.seed, self.steps, self.micro_batch, self.accumulation = seed, steps, micro_batch, accumulation
        self.val_blocks, self.val_batch, self.workers = val_blocks, val_batch or micro_batch, workers
        self.loader_timeout = loader_timeout

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
            timeout_s=self.loader_timeout,
            num_workers=self.workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.workers > 0,
            multiprocessing_context="spawn" if self.workers else None,
            generator=torch.Generator(),  # its own: else each pass draws a seed for the workers from the run's random numbers
            **how,
        )
