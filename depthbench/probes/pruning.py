"""Layer-skip ablation (probe 4 of arXiv 2609.32534): what the model loses with a block.

Leaving out block l costs the blocks after it; what comes before is run once for all.
"""

from __future__ import annotations

import pandas as pd
from torch import Tensor

from depthbench.nn.model import LanguageModel
from depthbench.probes._prefixes import skip_losses
from depthbench.probes.base import MICRO_BATCH, Progress, Rows, looking_at


def pruning(
    model: LanguageModel,
    tokens: Tensor,
    *,
    rule: str | None = None,
    micro_batch: int = MICRO_BATCH,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """delta(l) = loss with block l left out - loss, in nats per token.

    ``rule`` is one of the design's skip rules, None its default; the frame's ``rule`` column names it. ``tokens`` is (windows, T + 1).

    Rows: ``delta`` (i = block) and ``loss``, the model's own. ``skips`` gives them beside the causal score, from the same passes.
    Raises UserError for an unknown rule and tokens of a wrong shape.
    """
    rule = model.residual.skip_rule(rule)
    with looking_at(model) as model:
        losses = skip_losses(model, tokens, rule=rule, micro_batch=micro_batch, progress=progress)
    return pruning_rows(losses, tokens, rule)


def pruning_rows(losses: Tensor, tokens: Tensor, rule: str) -> pd.DataFrame:
    """The frame, from the loss summed over tokens with each block left out and, last, of the model as it is."""
    rows = Rows(tokens[:, 1:].numel(), rule)
    *without, loss = (losses / rows.n_tokens).tolist()
    for block, value in enumerate(without):
        rows.add("delta", value - loss, block)
    rows.add("loss", loss)
    return rows.frame()
