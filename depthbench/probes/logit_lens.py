"""Logit lens: what an exit after each block would predict (probes.md, probe 5).

N tokens, D width, V vocabulary, L blocks.
"""

from __future__ import annotations

from itertools import chain

import pandas as pd
import torch
from torch import Tensor

from depthbench.nn.model import LanguageModel
from depthbench.probes.base import MICRO_BATCH, Progress, Rows, looking_at, micro_batches

METRICS = ("loss", "kl", "top5_overlap")
TOP = 5
LOGITS, ROWS = 2**18, 64  # logits that are worked on together, to stay in the cache; but of so many tokens at least, for the product's sake


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
            size = max(ROWS, LOGITS // model.config.vocab_size)
            for *hidden_ND, targets_N in zip(*(tensor.split(size) for tensor in (*hidden, targets_BT.flatten())), strict=True):
                sums += compare(model.head, hidden_ND, targets_N)
    rows = Rows(tokens[:, 1:].numel())
    for boundary, values in enumerate((sums / rows.n_tokens).tolist()):
        for metric, value in zip(METRICS, values, strict=True):
            rows.add(metric, value, boundary)
    return rows.frame()


def compare(head: torch.nn.Module, hidden_ND: list[Tensor], targets_N: Tensor) -> Tensor:
    """The three METRICS summed over tokens, (L + 1, 3), from what the head multiplies at each boundary."""
    last_NV = head(hidden_ND[-1])
    p_NV, top = last_NV.softmax(-1, dtype=torch.float64), _top(last_NV)

    def sums(logits_NV: Tensor) -> Tensor:
        log_q = logits_NV.log_softmax(-1, dtype=torch.float64)
        common = (_top(logits_NV).unsqueeze(-1) == top.unsqueeze(-2)).any(-1)
        own = log_q.gather(-1, targets_N.unsqueeze(-1))
        return torch.stack([-own.sum(), -torch.linalg.vecdot(p_NV, log_q).sum(), common.double().mean(-1).sum()])

    found = torch.stack([sums(logits_NV) for logits_NV in chain(map(head, hidden_ND[:-1]), [last_NV])])
    found[:, 1] -= found[-1, 1].clone()  # KL(p || q) is the cross entropy less p's own
    return found


def _top(logits_NV: Tensor) -> Tensor:
    """The ids of the most likely tokens, (N, 5), or of all where there are fewer."""
    return logits_NV.topk(min(TOP, logits_NV.shape[-1]), sorted=False).indices
