"""What the probes that intervene share: each block is left out or exchanged in turn, and what comes before is run once.

An intervention at block b changes nothing before it. All runs with it start from one state, the one before b, and give bit for bit what
whole forward passes give.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from depthbench.nn.model import LanguageModel
from depthbench.probes.base import Progress, Rows, late_from, micro_batches, summed_loss
from depthbench.residuals.base import State


def prefixes(model: LanguageModel, inputs_BT: Tensor) -> Iterator[tuple[int, State]]:
    """(boundary, state there) from 0, before the first block, to L, after the last. Holds two states at a time.

    A state is handed out when the walk has gone on from it: designs whose states share a buffer copy it for all that go on later.
    """
    state = model.embed(inputs_BT)
    for block in range(len(model.blocks)):
        after = model.run(state, block, block + 1)
        yield block, state
        state = after
    yield len(model.blocks), state


def skip_losses(model: LanguageModel, tokens: Tensor, *, rule: str | None, micro_batch: int, progress: Progress | None = None) -> Tensor:
    """The cross entropy in nats, summed over all tokens, with each block left out in turn and then of the model as it is: (L + 1,), fp64.

    Takes the model in the mode that it is in.
    """
    losses = torch.zeros(len(model.blocks) + 1, dtype=torch.float64, device=model.head.weight.device)
    meter = Meter(progress, len(tokens) * sum(range(len(losses) + 1)))
    for inputs_BT, targets_BT in micro_batches(model, tokens, micro_batch, None):
        for block, state in prefixes(model, inputs_BT):
            with model.skipped(block, rule) if block < len(model.blocks) else nullcontext():
                losses[block] += summed_loss(model, model.run(state, block), targets_BT)
            meter.add(len(inputs_BT) * (len(losses) - block))
    return losses


class Meter:
    """Tells ``progress``, if there is one, what fraction of the whole is done, in blocks times windows; a loss counts as a block."""

    def __init__(self, progress: Progress | None, whole: int) -> None:
        self._progress, self._whole, self._done = progress, whole, 0

    def add(self, amount: int) -> None:
        self._done += amount
        if self._progress:
            self._progress(self._done / self._whole)


def add_scores(rows: Rows, scores_LL: Tensor) -> None:
    """The rows ``score`` of all pairs of blocks i < j."""
    for i, scores in enumerate(scores_LL.tolist()):
        for j in range(i + 1, len(scores)):
            rows.add("score", scores[j], i, j)


def add_late_fraction(rows: Rows, scores_LL: Tensor, threshold: float) -> None:
    """The row ``late_fraction``: of the pairs i < j with i >= L / 4 whose score is a number, those above the threshold; NaN without any."""
    n_layer = len(scores_LL)
    first, second = torch.triu_indices(n_layer, n_layer, 1, device=scores_LL.device)
    late = scores_LL[first, second][first >= late_from(n_layer)]
    if len(late):
        numbers = late[~late.isnan()]
        note = None if len(numbers) == len(late) else f"over the {len(numbers)} of {len(late)} pairs whose score is a number"
        rows.add("late_fraction", (numbers > threshold).double().mean(), note=note)
    else:
        rows.not_defined("late_fraction", f"the last three quarters of {n_layer} blocks hold no pair")
