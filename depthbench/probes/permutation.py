"""Permutation score (probe 3 of arXiv 2609.32534): what it costs when two blocks change places.

With blocks i < j exchanged, everything before block i is as it was, and is run once for all j: what remains are 2/3 (L + 1) / L of
L (L - 1) / 2 whole passes. Two states are kept, whatever the depth.
"""

from __future__ import annotations

import pandas as pd
import torch
from torch import Tensor

from depthbench.nn.model import LanguageModel
from depthbench.probes._prefixes import Meter, add_late_fraction, add_scores, prefixes
from depthbench.probes.base import MICRO_BATCH, Progress, Rows, looking_at, micro_batches, summed_loss

HARMFUL_ABOVE = 0.15  # the score of a late pair


def permutation(model: LanguageModel, tokens: Tensor, *, micro_batch: int = MICRO_BATCH, progress: Progress | None = None) -> pd.DataFrame:
    """P(i, j) = |loss - loss with blocks i and j exchanged| / loss, for all i < j. What of a block moves is for the design to say.

    ``tokens`` is (windows, T + 1).

    Rows: ``score`` (i, j); ``mean``, over all pairs; ``late_fraction``, of the pairs whose blocks both have an index of at least L/4, those
    with P > 0.15 (a pair whose score is NaN is left out, and ``note`` says so); ``loss``, the model's own, in nats per token. Scores and
    summaries are not defined where there is no pair.
    Raises UserError for tokens of a wrong shape.
    """
    with looking_at(model) as model:
        swapped_LL, loss = _losses(model, tokens, micro_batch, progress)
    rows, scores = Rows(tokens[:, 1:].numel()), (swapped_LL - loss).abs() / loss
    n_layer = len(scores)
    if n_layer == 1:
        rows.not_defined("score", "the only block has none to change places with")
    else:
        add_scores(rows, scores)
        rows.add("mean", scores.triu(1).sum() / (n_layer * (n_layer - 1) / 2))
        add_late_fraction(rows, scores, HARMFUL_ABOVE)
    rows.add("loss", loss / rows.n_tokens)
    return rows.frame()


def _losses(model: LanguageModel, tokens: Tensor, micro_batch: int, progress: Progress | None) -> tuple[Tensor, Tensor]:
    """Losses summed over tokens, in fp64: with blocks i < j exchanged, (L, L), and of the model as it is."""
    n_layer = len(model.blocks)
    swapped_LL = torch.zeros(n_layer, n_layer, dtype=torch.float64, device=model.head.weight.device)
    loss = swapped_LL.new_zeros(())
    meter = Meter(progress, len(tokens) * sum((n_layer - 1 - i) * (n_layer + 1 - i) for i in range(n_layer)))
    for inputs_BT, targets_BT in micro_batches(model, tokens, micro_batch, None):
        for i, state in prefixes(model, inputs_BT):
            for j in range(i + 1, n_layer):
                with model.swapped(i, j):
                    swapped_LL[i, j] += summed_loss(model, model.run(state, i), targets_BT)
                meter.add(len(inputs_BT) * (n_layer + 1 - i))
        loss += summed_loss(model, state, targets_BT)
    return swapped_LL, loss
