"""The order of training sequences: a pure function of seed and step."""

import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from depthbench.corpora import BlockDataset
from depthbench.errors import UserError
from depthbench.training.data import BlockLoader, CorpusDataModule, StepSampler, corpus_pass
from depthbench.training.interruption import Interrupted, stopped_at_once
from tests.conftest import text_corpus
from tests.training.held import Held

CHUNKS = [7, 5, 7, 2]  # 21 blocks
BLOCKS = sum(CHUNKS)


def sampler(**changes):
    return StepSampler(CHUNKS, **{"seed": 3, "steps": 14, "micro_batch": 3, "accumulation": 1, **changes})


def flat(batches):
    return [block for batch in batches for block in batch]


def test_each_pass_visits_every_block_once_and_passes_differ():
    order = flat(sampler())  # 42 sequences: two passes, their border inside no step
    first, second = order[:BLOCKS], order[BLOCKS:]
    assert Counter(first) == Counter(second) == Counter(range(BLOCKS))
    assert first != second


def test_a_step_across_the_end_of_a_pass_loses_and_repeats_nothing():
    order = flat(sampler(steps=5, micro_batch=8))  # 40 sequences: step 2 spans the border at 21
    assert Counter(order[:BLOCKS]) == Counter(range(BLOCKS))
    assert len(set(order[BLOCKS:])) == len(order[BLOCKS:]) == 19


def test_a_pass_reads_one_chunk_after_the_other():
    chunk_of = [chunk for chunk, size in enumerate(CHUNKS) for _ in range(size)]
    visited = [chunk_of[block] for block in corpus_pass(CHUNKS, seed=0, index=0)]
    changes = sum(a != b for a, b in zip(visited, visited[1:], strict=False))
    assert changes == len(CHUNKS) - 1


def test_the_seed_decides_the_order():
    assert flat(sampler()) == flat(sampler())
    assert flat(sampler()) != flat(sampler(seed=4))


@pytest.mark.parametrize(("micro_batch", "accumulation"), [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_micro_batches_do_not_change_a_step(micro_batch, accumulation):
    reference = flat(sampler(micro_batch=6, steps=7))
    assert flat(sampler(micro_batch=micro_batch, accumulation=accumulation, steps=7)) == reference


def test_ranks_share_each_step():
    whole = list(sampler(micro_batch=6, steps=7))
    ranks = [list(sampler(micro_batch=1, accumulation=2, world_size=3, rank=rank, steps=7)) for rank in range(3)]
    for step, blocks in enumerate(whole):
        shared = flat(batch for rank in ranks for batch in rank[2 * step : 2 * step + 2])
        assert Counter(shared) == Counter(blocks)


def test_resuming_at_a_step_goes_on_with_the_same_sequences():
    resumed = sampler(accumulation=2)
    resumed.start_step = 9
    assert list(resumed) == list(sampler(accumulation=2))[18:]
    assert len(resumed) == len(sampler(accumulation=2)) == 28


class Broken:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise UserError("chunk 7 is damaged: prepare the corpus again")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_chunk_is_one_line_from_a_loader_process_too(workers):
    with pytest.raises(UserError) as error:
        list(BlockLoader(Broken(), num_workers=workers))
    assert str(error.value) == "chunk 7 is damaged: prepare the corpus again"


def test_a_plan_without_batches_is_refused():
    with pytest.raises(UserError, match="0 steps on 21 training blocks make no batch"):
        sampler(steps=0)
    with pytest.raises(UserError, match="14 steps on 0 training blocks make no batch"):
        StepSampler([], seed=3, steps=14, micro_batch=3, accumulation=1)


@pytest.fixture(scope="module")
def small_corpus(tmp_path_factory):
    return text_corpus(tmp_path_factory, texts=6)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_serves_the_samplers_blocks_across_two_ends_of_the_corpus_and_after_a_resume(small_corpus, workers):
    blocks = BlockDataset(small_corpus, "train")
    number = {block.numpy().tobytes(): index for index, block in enumerate(blocks[i] for i in range(len(blocks)))}
    steps = 2 * len(blocks) // 64 + 3
    module = CorpusDataModule(small_corpus, seed=3, steps=steps, micro_batch=32, accumulation=2, val_blocks=8, workers=workers)
    states = torch.get_rng_state()
    seen = [[number[block.numpy().tobytes()] for block in batch] for batch in module.train_dataloader()]
    assert torch.equal(torch.get_rng_state(), states)
    order = [block for index in range(4) for block in corpus_pass(blocks.chunk_sizes, seed=3, index=index)]
    assert 2 * len(blocks) < steps * 64 and flat(seen) == order[: steps * 64]
    module.workers = 0  # others take seconds to start
    module.trainer = SimpleNamespace(global_rank=0, world_size=1, global_step=steps - 2)
    resumed = [[number[block.numpy().tobytes()] for block in batch] for batch in module.train_dataloader()]
    assert resumed == seen[-4:]


@pytest.fixture
def held(tiny_corpus, tmp_path):
    """A loader of batches of 4, the second batch of which is held up at its third block; and that block, the file that releases it."""
    released = tmp_path / "released"

    def loader(split, workers):
        module = CorpusDataModule(tiny_corpus, seed=3, steps=4, micro_batch=4, accumulation=1, val_blocks=16, workers=workers)
        loader = module.train_dataloader() if split == "train" else module.val_dataloader()
        dataset = loader.dataset if split == "train" else loader.dataset.dataset
        dataset.__class__ = Held
        dataset.block, dataset.released = list(loader.batch_sampler)[1][2], released
        return loader, dataset.block, released

    yield loader
    released.touch()


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left():
    """After all tests, as a thread may take the seconds to end after which torch looks for its processes."""
    yield
    assert soon(lambda: not readers()), "a thread is left"
    assert soon(lambda: not multiprocessing.active_children()), "a process is left"


def readers():
    return [thread for thread in threading.enumerate() if thread.name == "depthbench batches"]


def soon(condition, seconds=20):
    """Whether it becomes true in so many seconds."""
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def handler_of_torch():
    """Raises the death of any loader process in the main thread, wherever that stands; a program's other DataLoaders set it."""
    before = signal.signal(signal.SIGCHLD, lambda *_: torch._C._error_if_any_worker_fails())
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("handler_of_torch")
@pytest.mark.parametrize(("workers", "split"), [(0, "train"), (2, "train"), (0, "val")])
def test_a_batch_that_does_not_come_names_its_chunk_and_blocks(held, tiny_corpus, workers, split):
    loader, block, _ = held(split, workers)
    batches = iter(loader)
    next(batches)  # loader processes take a while to start
    loader.timeout_s = 0.2
    with pytest.raises(UserError) as error:
        next(batches)
    said = str(error.value)
    wanted = list(loader.batch_sampler)[1]
    assert said.startswith(f"no batch in 0.2 s, with {workers or 'no'} loader processes") and block in wanted
    assert f"blocks {', '.join(map(str, wanted))} of {tiny_corpus}/{split}/chunk-0-0.bin did not arrive" in said
    assert "--loader-timeout" in said and "\n" not in said
    assert soon(lambda: not multiprocessing.active_children(), 3), "a loader process that hangs outlives the error"


def test_a_process_that_ends_amid_handing_over_a_batch_is_one_line(held, monkeypatch):
    loader, _, _ = held("train", 0)
    ended = SimpleNamespace(pid=7, exitcode=-9)

    def cut_off(self, timeout_s):
        self.processes = [ended]
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr("depthbench.training.data._Reader.next", cut_off)
    with pytest.raises(UserError, match="loader process 7 of 0 was killed by SIGKILL"):
        next(iter(loader))
    ended.exitcode = None
    with pytest.raises(ConnectionResetError):
        next(iter(loader))


def test_without_a_limit_it_waits(held):
    loader, _, released = held("train", 0)
    assert loader.timeout_s == 300
    loader.timeout_s = 0
    threading.Timer(0.3, released.touch).start()
    assert len(list(loader)) == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_obeyed_while_a_batch_is_waited_for(held, number):
    loader, _, _ = held("train", 0)
    threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
    with stopped_at_once(), pytest.raises(Interrupted):
        list(loader)


@pytest.fixture
def no_handler_of_torch():
    """As in a program whose only loaders are ours; another test's own DataLoader may have left torch's."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGCHLD, before)


def test_ctrl_c_in_a_terminal_leaves_the_loader_processes_alone_and_a_killed_one_is_one_line(held, no_handler_of_torch):
    loader, _, released = held("train", 2)
    batches = iter(loader)
    next(batches)
    processes = multiprocessing.active_children()
    for process in processes:
        os.kill(process.pid, signal.SIGINT)
    released.touch()
    assert len([next(batches), next(batches), next(batches)]) == 3
    released.unlink()
    batches = iter(loader)  # the same processes again, as for the next validation
    next(batches)
    processes[1].kill()
    processes[1].join()
    with pytest.raises(UserError, match=f"loader process {processes[1].pid} of 2 was killed by SIGKILL: .* use fewer --workers"):
        for _ in range(3):
            next(batches)
