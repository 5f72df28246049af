"""Residual norm and cosine drift (probes.md, probe 11)."""

from __future__ import annotations

import pandas as pd
import torch
from torch import Tensor

from depthbench.nn.model import LanguageModel
from depthbench.probes.angular import add_zero_vectors, directions
from depthbench.probes.base import MICRO_BATCH, Progress, Rows, looking_at, micro_batches


def norms(model: LanguageModel, tokens: Tensor, *, micro_batch: int = MICRO_BATCH, progress: Progress | None = None) -> pd.DataFrame:
    """How long depth states are and how far they have turned: means over tokens, in fp64.

        residual_norm(l) = mean ||z_l||_2 / sqrt(width)              0 <= l <= L, 0 the embedding
        cosine_next(l)   = mean cos(z_l, z_{l+1})                    0 <= l < L; 1 minus it is the drift
        cosine_first(l)  = mean cos(z_0, z_l)                        0 <= l <= L

    ``tokens`` is (windows, T + 1). A zero vector has no cosine: rows ``zero_vectors`` (l) say how many there are, if any, and cosines
    with them are left out (NaN where none remain). Source: arXiv 2609.32534.
    """
    with looking_at(model) as model:
        n_layer, device = len(model.blocks), model.head.weight.device
        lengths, zeros = torch.zeros(2, n_layer + 1, dtype=torch.float64, device=device)
        to_next, to_first = _Cosines(n_layer, device), _Cosines(n_layer + 1, device)
        for inputs_BT, _ in micro_batches(model, tokens, micro_batch, progress):
            first = before = None
            for boundary, state in enumerate(model.boundaries(model.embed(inputs_BT))):
                z_BTW = model.residual.depth_state(state, block=boundary)
                here = directions(z_BTW)
                lengths[boundary] += here[1].sum() / z_BTW.shape[-1] ** 0.5
                zeros[boundary] += (here[1] == 0).sum()
                first = first or here
                to_first.add(boundary, first, here)
                if before:
                    to_next.add(boundary - 1, before, here)
                before = here
    rows = Rows(tokens[:, 1:].numel())
    for metric, values in {"residual_norm": lengths / rows.n_tokens, "cosine_next": to_next.means, "cosine_first": to_first.means}.items():
        for boundary, value in enumerate(values.tolist()):
            rows.add(metric, value, boundary)
    add_zero_vectors(rows, zeros.long())
    return rows.frame()


class _Cosines:
    """Means over tokens of cosines between (unit vectors, norms), as ``directions`` gives them."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._sums, self._counts = torch.zeros(2, size, dtype=torch.float64, device=device)

    def add(self, index: int, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> None:
        self._sums[index] += torch.linalg.vecdot(one[0], other[0]).clamp(-1, 1).sum()  # 0 where a vector is zero
        self._counts[index] += ((one[1] != 0) & (other[1] != 0)).sum()

    @property
    def means(self) -> Tensor:
        return self._sums / self._counts
