"""The order of training sequences: a pure function of seed and step."""

from collections import Counter

import pytest

from depthbench.errors import UserError
from depthbench.training.data import BlockLoader, CorpusDataModule, StepSampler, corpus_pass

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


def batches(corpus, workers, steps=6):
    module = CorpusDataModule(corpus, seed=3, steps=steps, micro_batch=4, accumulation=1, val_blocks=8, workers=workers)
    return [batch.tolist() for batch in module.train_dataloader()]


def test_loader_processes_change_nothing(tiny_corpus):
    here = batches(tiny_corpus, workers=0)
    assert len(here) == 6 and len(here[0]) == 4 and len(here[0][0]) == 129
    assert batches(tiny_corpus, workers=2) == here


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
