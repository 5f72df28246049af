"""Logit lens: what an exit after each block would predict (probes.md, probe 5).

N tokens, D width, V vocabulary, L blocks.
"""

from __future__ import annotations

import pandas as pd
import torch
from torch import Tensor

from depthbench.nn.model import LanguageModel
from depthbench.probes.base import MICRO_BATCH, Progress, Rows, looking_at, micro_batches

METRICS = ("loss", "kl", "top5_overlap")
TOP = 5
PARTS = 16  # of a micro-batch's tokens: the fp64 work on one part's logits takes less room than a forward pass's logits of all


def logit_lens(model: LanguageModel, tokens: Tensor, *, micro_batch: int = MICRO_BATCH, progress: Progress | None = None) -> pd.DataFrame:
    """The predictions q_l that final norm and head make of every boundary's readout, beside the model's own, p = q_L.

        loss(l)         = mean -ln q_l(target)                         nats per token; the last is the model's loss
        kl(l)           = mean KL(p || q_l)                            nats per token; the last is 0
        top5_overlap(l) = mean |top5(p) & top5(q_l)| / 5               the last is 1; 0 <= l <= L, 0 the embedding

    ``tokens`` is (windows, T + 1). The readout is the design's own: hyper-connections reduce their streams as at the end, attention
    residuals take the mix that the next consumer computes. Means over tokens, in fp64. Source: arXiv 2609.32534.
    """
    with looking_at(model) as model:
        sums = torch.zeros(len(model.blocks) + 1, len(METRICS), dtype=torch.float64, device=model.head.weight.device)
        for inputs_BT, targets_BT in micro_batches(model, tokens, micro_batch, progress):
            states = enumerate(model.boundaries(model.embed(inputs_BT)))
            hidden = [model.residual.close(state, model.final_norm, block=block).flatten(0, 1) for block, state in states]
            size = -(-targets_BT.numel() // PARTS)
            for *hidden_ND, targets_N in zip(*(tensor.split(size) for tensor in (*hidden, targets_BT.flatten())), strict=True):
                sums += compare(model.head, hidden_ND, targets_N)
    rows = Rows(tokens[:, 1:].numel())
    for boundary, values in enumerate((sums / rows.n_tokens).tolist()):
        for metric, value in zip(METRICS, values, strict=True):
            rows.add(metric, value, boundary)
    return rows.frame()


def compare(head: torch.nn.Module, hidden_ND: list[Tensor], targets_N: Tensor) -> Tensor:
    """The three METRICS summed over tokens, (L + 1, 3), from what the head multiplies at each boundary."""
    last = head(hidden_ND[-1]).double().log_softmax(-1)  # (N, V): ln p
    p, top = last.exp(), _top(last)
    found = []
    for h_ND in hidden_ND:
        q = last if h_ND is hidden_ND[-1] else head(h_ND).double().log_softmax(-1)
        common = (top.unsqueeze(-1) == _top(q).unsqueeze(-2)).any(-1)
        found.append(torch.stack([-q.gather(-1, targets_N.unsqueeze(-1)).sum(), (p * (last - q)).sum(), common.double().mean(-1).sum()]))
    return torch.stack(found)


def _top(log_probabilities_NV: Tensor) -> Tensor:
    """The ids of the most likely tokens, (N, 5), or of all where there are fewer."""
    return log_probabilities_NV.topk(min(TOP, log_probabilities_NV.shape[-1]), sorted=False).indices
