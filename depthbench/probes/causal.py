"""Causal score (probe 2 of arXiv 2609.32534): how much what a block does depends on an earlier one.

    C(s, l) = mean ||(z~_{l+1} - z~_l) - (z_{l+1} - z_l)||_2 / mean ||z_{l+1} - z_l||_2,    l > s

z_l are the depth states, z~_l those with block s left out. Means are over tokens; C is a ratio of means, not a mean of ratios.

With the states at all boundaries kept, leaving out block s costs the blocks after it, and of its own states only two are there at a time.
At the end of each such run stands the loss without block s, which is all that pruning asks for.

B windows, T time, W width of the depth state, L blocks.
"""

from __future__ import annotations

from itertools import islice, pairwise
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from depthbench.nn.model import LanguageModel
from depthbench.probes._prefixes import Meter, add_late_fraction, add_scores
from depthbench.probes.base import MICRO_BATCH, Progress, Rows, looking_at, micro_batches, summed_loss
from depthbench.probes.pruning import pruning_rows
from depthbench.residuals.base import State

STILL = 1e-8  # a shorter mean step is none: no change to it has a score
DEPENDS_ABOVE = 0.45  # the score of a late pair


def causal(
    model: LanguageModel,
    tokens: Tensor,
    *,
    rule: str | None = None,
    micro_batch: int = MICRO_BATCH,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """C(s, l): by how much block l's step changes when block s before it is left out, over the length of that step.

    ``rule`` is one of the design's skip rules, None its default; the frame's ``rule`` column names it. ``tokens`` is (windows, T + 1).

    Rows: ``score`` (i = s, j = l > s), 0 where block l's mean step is shorter than 1e-8; ``mean``, which is (1/sqrt(L)) (1/L) sum_s
    mean_{l>s} C(s, l): the last block, having none after it, adds nothing to the sum and counts in L; ``late_fraction``, of the pairs
    whose blocks both have an index of at least L/4, those with C > 0.45 (a pair whose score is NaN is left out, and ``note`` says so). Not
    defined where there is no pair.
    Raises UserError for an unknown rule and tokens of a wrong shape.
    """
    return skips(model, tokens, rule=rule, micro_batch=micro_batch, progress=progress)["causal"]


def skips(
    model: LanguageModel,
    tokens: Tensor,
    *,
    rule: str | None = None,
    micro_batch: int = MICRO_BATCH,
    progress: Progress | None = None,
) -> dict[str, pd.DataFrame]:
    """``causal`` and ``pruning``, by these names, from the same passes; arguments and errors are theirs."""
    rule = model.residual.skip_rule(rule)
    with looking_at(model) as model:
        n_layer = len(model.blocks)
        sums = _Sums.zeros(n_layer, model.head.weight.device)
        meter = Meter(progress, len(tokens) * (n_layer + 1 + sum(range(1, n_layer + 1))))
        for inputs_BT, targets_BT in micro_batches(model, tokens, micro_batch, None):
            _add(sums, model, inputs_BT, targets_BT, rule, meter)
    return {"causal": _causal_rows(sums, tokens, rule), "pruning": pruning_rows(sums.losses, tokens, rule)}


class _Sums(NamedTuple):
    """Over tokens, in fp64."""

    steps: Tensor  # (L,) [l]: ||z_{l+1} - z_l||
    changes: Tensor  # (L, L) [s, l > s]: of that step, with block s left out
    losses: Tensor  # (L + 1,): with block s left out, and last with none

    @classmethod
    def zeros(cls, n_layer: int, device: torch.device) -> _Sums:
        return cls(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in (n_layer, (n_layer, n_layer), n_layer + 1)))


def _add(sums: _Sums, model: LanguageModel, inputs_BT: Tensor, targets_BT: Tensor, rule: str, meter: Meter) -> None:
    """One micro-batch."""
    states, z = [], []
    for boundary, state in enumerate(model.boundaries(model.embed(inputs_BT))):
        states.append(state)
        z.append(model.residual.depth_state(state, block=boundary))
    sums.losses[-1] += summed_loss(model, states.pop(), targets_BT)
    for block, (before, after) in enumerate(pairwise(z)):
        sums.steps[block] += _summed_length(_step(before, after))
    meter.add(len(inputs_BT) * len(z))
    for skipped, state in enumerate(states):
        with model.skipped(skipped, rule):
            state = _run_on(model, state, skipped, z, sums.changes[skipped])
            sums.losses[skipped] += summed_loss(model, state, targets_BT)
        meter.add(len(inputs_BT) * (len(states) - skipped))


def _run_on(model: LanguageModel, start: State, skipped: int, z: list[Tensor], changes: Tensor) -> State:
    """The last state of the run that leaves out block ``skipped``, from the state before it; adds the changes of all later steps."""
    before = None
    for boundary, state in islice(enumerate(model.boundaries(start, skipped), skipped), 1, None):
        after = model.residual.depth_state(state, block=boundary)
        if before is not None:
            changes[boundary - 1] += _summed_length(_step(before, after).sub_(_step(z[boundary - 1], z[boundary])))
        before = after
    return state


def _step(before_BTW: Tensor, after_BTW: Tensor) -> Tensor:
    """In no less than fp32."""
    wide = torch.promote_types(before_BTW.dtype, torch.float32)
    return after_BTW.to(wide) - before_BTW.to(wide)


def _summed_length(vectors_BTW: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vectors_BTW, dim=-1).sum(dtype=torch.float64)


def _causal_rows(sums: _Sums, tokens: Tensor, rule: str) -> pd.DataFrame:
    rows, n_layer = Rows(tokens[:, 1:].numel(), rule), len(sums.steps)
    scores = (sums.changes / sums.steps).masked_fill(sums.steps / rows.n_tokens < STILL, 0.0)
    if n_layer == 1:
        rows.not_defined("score", "no block comes after the only one")
        return rows.frame()
    add_scores(rows, scores)
    rows.add("mean", sum(scores[s, s + 1 :].mean() for s in range(n_layer - 1)) / n_layer**1.5)
    add_late_fraction(rows, scores, DEPENDS_ABOVE)
    return rows.frame()
