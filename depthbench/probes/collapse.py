"""Token collapse: how many directions the tokens of a window still span (probes.md, probe 8).

B windows, T tokens of each, W width of a depth state, R = min(T, W).
"""

from __future__ import annotations

import pandas as pd
import torch
from torch import Tensor

from depthbench.nn.model import LanguageModel
from depthbench.probes.base import MICRO_BATCH, Progress, Rows, looking_at, micro_batches

METRICS = ("stable_rank", "effective_rank", "nuclear_ratio")


def collapse(model: LanguageModel, tokens: Tensor, *, micro_batch: int = MICRO_BATCH, progress: Progress | None = None) -> pd.DataFrame:
    """Ranks of the T x width matrix of a window's tokens at every boundary, averaged over windows; s are its singular values.

        stable_rank(l)    = sum s^2 / max s^2
        effective_rank(l) = exp(-sum p ln p),   p = s^2 / sum s^2
        nuclear_ratio(l)  = sum s / sqrt(sum s^2)                    0 <= l <= L, 0 the embedding; all are 1 at rank one

    ``tokens`` is (windows, T + 1). A matrix of zeros has no rank: rows ``zero_windows`` (l) say how many there are, if any, and they
    are left out (NaN where none remain).

    s^2 are the eigenvalues of the smaller Gram matrix, in fp64: that takes a fraction of a singular value decomposition's time, and what
    it blurs, singular values below 1e-8 of the largest, lies below the rounding of the states themselves. Source: arXiv 2609.32534.
    """
    with looking_at(model) as model:
        sums = torch.zeros(len(model.blocks) + 1, len(METRICS), dtype=torch.float64, device=model.head.weight.device)
        zeros = torch.zeros(len(model.blocks) + 1, dtype=torch.long, device=sums.device)
        for inputs_BT, _ in micro_batches(model, tokens, micro_batch, progress):
            for boundary, state in enumerate(model.boundaries(model.embed(inputs_BT))):
                squares_BR = squared_singular_values(model.residual.depth_state(state, block=boundary))
                exists = squares_BR.sum(-1) != 0
                sums[boundary] += ranks(squares_BR[exists]).sum(0)
                zeros[boundary] += (~exists).sum()
    rows = Rows(tokens[:, 1:].numel())
    for boundary, values in enumerate((sums / (len(tokens) - zeros).unsqueeze(-1)).tolist()):
        for metric, value in zip(METRICS, values, strict=True):
            rows.add(metric, value, boundary)
    for boundary, count in enumerate(zeros.tolist()):
        if count:
            rows.add("zero_windows", count, boundary, note=f"{count} windows whose depth states are all zero are left out")
    return rows.frame()


def squared_singular_values(matrices_BTW: Tensor) -> Tensor:
    """(B, T, W) -> (B, R), in fp64; NaN for a matrix with an element that is not finite."""
    matrices = matrices_BTW.double()
    gram = matrices @ matrices.mT if matrices.shape[-2] < matrices.shape[-1] else matrices.mT @ matrices
    finite = gram.isfinite().all(-1).all(-1, keepdim=True)
    values = torch.linalg.eigvalsh(gram.where(finite.unsqueeze(-1), 0.0)).clamp(min=0)
    return values.where(finite, torch.nan)


def ranks(squares_BR: Tensor) -> Tensor:
    """Squared singular values (B, R), not all zero -> (B, 3): the three METRICS."""
    total = squares_BR.sum(-1)
    shares = squares_BR / total.unsqueeze(-1)
    entropy = torch.special.entr(shares).sum(-1)
    return torch.stack([total / squares_BR.amax(-1), entropy.exp(), squares_BR.sqrt().sum(-1) / total.sqrt()], -1)
