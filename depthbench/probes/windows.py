"""The held-out windows that probes look at."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

from depthbench.errors import UserError

COUNT = 128
LONGEST = 512  # tokens predicted per window


def windows(held_out: Dataset, count: int = COUNT, *, length: int | None = None, seed: int = 0) -> Tensor:
    """``count`` windows of held-out text, LongTensor (n, length + 1): what a probe takes as ``tokens``. Fewer where there are not as many.

    ``held_out`` holds blocks (T + 1,), as ``load_run(…).held_out`` does; ``length`` is how many tokens of a window are predicted
    (default: min(512, T)). A block holds T // length windows, side by side; the windows are sampled from all of them without
    replacement, by ``seed``: the same for every run that holds out the same blocks, and the smaller sample is the beginning of the larger.
    Raises UserError where ``length`` is longer than a block, or a number is below 1.
    """
    trained = len(held_out[0]) - 1
    length = min(LONGEST, trained) if length is None else length
    if count < 1:
        raise UserError(f"{count} windows measure nothing: ask for at least one")
    if not 1 <= length <= trained:
        raise UserError(f"windows of {length} tokens do not fit: give a length from 1 to {trained}, the run's sequence length")
    per_block = trained // length
    sampled = torch.randperm(len(held_out) * per_block, generator=torch.Generator().manual_seed(seed))[:count].tolist()
    places = [(place // per_block, place % per_block * length) for place in sampled]
    return torch.stack([held_out[block][start : start + length + 1] for block, start in places])
