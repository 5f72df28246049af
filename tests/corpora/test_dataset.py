import multiprocessing
import os
import pickle
import random

import numpy as np
import pytest
import torch
from litdata import StreamingDataset, TokensLoader
from torch.utils.data import DataLoader

from depthbench.corpora import BlockDataset
from depthbench.errors import UserError
from tests.corpora.conftest import BLOCK


@pytest.fixture(scope="module")
def in_order(ready):
    blocks = StreamingDataset(str(ready.folder / "train"), item_loader=TokensLoader(block_size=BLOCK))
    return torch.from_numpy(np.stack(list(blocks)).astype(np.int64))


def test_every_block_by_its_number_in_any_order(ready, in_order):
    blocks = BlockDataset(ready.folder, "train")
    assert len(blocks) == ready.blocks["train"] == len(in_order)
    assert blocks.chunk_sizes == [chunk.blocks for chunk in ready.train.chunks]
    assert sum(blocks.chunk_sizes) == len(blocks)
    order = list(range(len(blocks)))
    random.Random(0).shuffle(order)
    for i in order:
        block = blocks[i]
        assert (block.dtype, block.shape) == (torch.int64, (BLOCK,))
        assert torch.equal(block, in_order[i])


def test_numbers_as_samplers_give_them(ready, in_order):
    blocks = BlockDataset(str(ready.folder), "train")
    for index in (np.int64(3), torch.tensor(3), 3 - len(blocks)):
        assert torch.equal(blocks[index], in_order[3])
    for index in (len(blocks), -len(blocks) - 1):
        with pytest.raises(IndexError):
            blocks[index]


def test_the_held_out_split_is_another(ready, in_order):
    blocks = BlockDataset(ready.folder, "val")
    assert len(blocks) == ready.blocks["val"]
    assert not torch.equal(blocks[0], in_order[0])
    with pytest.raises(UserError, match="unknown split 'valid': did you mean 'val'"):
        BlockDataset(ready.folder, "valid")


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_read_the_same(ready, in_order, context):
    if context not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {context} here")
    blocks = BlockDataset(ready.folder, "train")
    blocks[0]  # open in this process before the workers start
    loader = DataLoader(blocks, batch_size=8, num_workers=1, multiprocessing_context=context)
    assert torch.equal(torch.cat(list(loader)), in_order)
    assert torch.equal(blocks[5], in_order[5])


def test_a_copy_opens_the_chunks_for_itself(ready, in_order):
    blocks = BlockDataset(ready.folder, "train")
    before = len(pickle.dumps(blocks))
    blocks[0]
    assert len(pickle.dumps(blocks)) == before
    assert torch.equal(pickle.loads(pickle.dumps(blocks))[7], in_order[7])


def test_reading_leaves_the_folder_as_it_was(ready):
    before = {path: path.stat().st_mtime_ns for path in ready.folder.rglob("*")}
    blocks = BlockDataset(ready.folder, "train")
    for i in range(0, len(blocks), 7):
        blocks[i]
    assert {path: path.stat().st_mtime_ns for path in ready.folder.rglob("*")} == before


def test_a_folder_with_signs_that_mean_something_elsewhere(copy, in_order):
    odd = copy.rename(copy.parent / "50% of {it}")
    assert torch.equal(BlockDataset(odd, "train")[1], in_order[1])


def test_a_damaged_chunk_is_refused_on_opening(copy):
    path = copy / "train" / "chunk-0-2.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"{path} has"):
        BlockDataset(copy, "train")
    assert len(BlockDataset(copy, "val")) > 0


@pytest.mark.parametrize("position", [0, -1])
def test_an_id_beyond_the_vocabulary_names_its_chunk(copy, position):
    blocks = BlockDataset(copy, "train")
    path = copy / "train" / "chunk-0-2.bin"
    content = bytearray(path.read_bytes())
    first = len(content) - blocks.chunk_sizes[2] * BLOCK * 2
    content[(first if position == 0 else len(content) - 2) + 1] = 0xFF
    path.write_bytes(content)
    start = sum(blocks.chunk_sizes[:2])
    bad = start if position == 0 else start + blocks.chunk_sizes[2] - 1
    with pytest.raises(UserError, match=f"{path} holds a token id beyond the vocabulary's 300: run `depthbench data prepare"):
        blocks[bad]
    for good in (start - 1, start + 1, start + blocks.chunk_sizes[2]):
        blocks[good]


def test_a_remote_folder_is_streamed_through_the_cache(ready, in_order, tmp_path):
    """LitData's own stand-in for a bucket: "local:" folders are downloaded chunk by chunk like those of s3://."""
    cache = tmp_path / "cache"
    blocks = BlockDataset(f"local:{ready.folder}", "train", cache_dir=cache)
    order = random.Random(1).sample(range(len(blocks)), 40)
    for i in order:
        assert torch.equal(blocks[i], in_order[i])
    copied = {name for _, _, names in os.walk(cache) for name in names if name.endswith(".bin")}
    assert copied <= {chunk.file.removeprefix("train/") for chunk in ready.train.chunks}
    assert copied


def test_a_remote_folder_is_checked_too(copy):
    (copy / "train" / "chunk-0-2.bin").unlink()
    with pytest.raises(UserError, match="corpus file local:.*/train/chunk-0-2.bin is missing: run `depthbench data prepare text"):
        BlockDataset(f"local:{copy}", "train")


def test_a_remote_chunk_that_goes_away_is_one_line(copy, tmp_path):
    blocks = BlockDataset(f"local:{copy}", "train", cache_dir=tmp_path / "cache")
    (copy / "train" / "chunk-0-2.bin").unlink()
    with pytest.raises(UserError, match=f"corpus file local:{copy}/train/chunk-0-2.bin cannot be read .The provided remote_path") as error:
        blocks[sum(blocks.chunk_sizes[:2])]
    assert "\n" not in str(error.value)
