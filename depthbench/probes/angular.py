"""Angular distance between depth states (probes.md, probe 1).

N tokens, S = L + 1 depth states, P pairs of them, W their width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pandas as pd
import torch
from torch import Tensor

from depthbench.nn.model import LanguageModel
from depthbench.probes.base import MICRO_BATCH, Progress, Rows, looking_at, micro_batches

NEAR = 1 - 1e-6  # of |cosine|: beyond, arccos would lose half of its digits
SCRATCH = 2**20  # fp64 numbers in the vectors that are worked on together: 8 MiB


def angular(model: LanguageModel, tokens: Tensor, *, micro_batch: int = MICRO_BATCH, progress: Progress | None = None) -> pd.DataFrame:
    """Angular distance of all pairs of depth states, in half turns: 0 the same direction, 0.5 orthogonal, 1 opposite.

        d(i, j) = mean over tokens of angle(z_i, z_j) / pi        boundaries 0 <= i < j <= L, 0 the embedding

    ``tokens`` is (windows, T + 1). Rows: ``distance`` (i, j), and ``zero_vectors`` (i) where there are some: that many tokens have a z_i
    of zero, hence no angle, and are left out of the means with z_i (NaN where none remain). Equal vectors are exactly 0 apart.
    Source: arXiv 2609.32534.
    """
    with looking_at(model) as model:
        first, second = torch.triu_indices(len(model.blocks) + 1, len(model.blocks) + 1, 1, device=model.head.weight.device)
        total, count = torch.zeros(len(first), dtype=torch.float64, device=first.device), torch.zeros_like(first)
        zeros = torch.zeros(len(model.blocks) + 1, dtype=torch.long, device=first.device)
        for inputs_BT, _ in micro_batches(model, tokens, micro_batch, progress):
            states = enumerate(model.boundaries(model.embed(inputs_BT)))
            states = [model.residual.depth_state(state, block=block).flatten(0, 1) for block, state in states]
            for states_NSW in _chunks(states):
                units_NSW, norms_NS = directions(states_NSW)
                angles, exists = angles_between(units_NSW, first, second), norms_NS != 0
                defined = exists[:, first] & exists[:, second]
                total += angles.where(defined, 0.0).sum(0)
                count += defined.sum(0)
                zeros += (~exists).sum(0)
    rows = Rows(tokens[:, 1:].numel())
    for i, j, distance in zip(first.tolist(), second.tolist(), (total / count / math.pi).tolist(), strict=True):
        rows.add("distance", distance, i, j)
    add_zero_vectors(rows, zeros)
    return rows.frame()


def angles_between(units_NSW: Tensor, first_P: Tensor, second_P: Tensor) -> Tensor:
    """Angles in radians, (N, P), between the unit vectors of index ``first`` and ``second`` of each token.

    arccos of the Gram matrix; where vectors are nearly parallel, 2 atan2(|u - v|, |u + v|).
    """
    cosines = torch.bmm(units_NSW, units_NSW.mT)[:, first_P, second_P]
    angles = cosines.clamp(-1, 1).acos()
    tokens, pairs = (cosines.abs() > NEAR).nonzero(as_tuple=True)
    for n, p in zip(*(index.split(max(1, SCRATCH // units_NSW.shape[-1])) for index in (tokens, pairs)), strict=True):
        u, v = units_NSW[n, first_P[p]], units_NSW[n, second_P[p]]
        angles[n, p] = 2 * torch.atan2(torch.linalg.vector_norm(u - v, dim=-1), torch.linalg.vector_norm(u + v, dim=-1))
    return angles


def directions(states: Tensor) -> tuple[Tensor, Tensor]:
    """(..., W) -> (unit vectors (..., W), norms (...)), both in fp64. A zero vector stays zero."""
    norms = torch.linalg.vector_norm(states, dim=-1, dtype=torch.float64)
    return states.double() / norms.masked_fill(norms == 0, 1.0).unsqueeze(-1), norms


def add_zero_vectors(rows: Rows, counts: Tensor) -> None:
    """A row ``zero_vectors`` for every boundary where there are some, from their numbers (S)."""
    for boundary, count in enumerate(counts.tolist()):
        if count:
            rows.add("zero_vectors", count, boundary, note=f"{count} tokens whose depth state is zero are left out")


def _chunks(states_NW: list[Tensor]) -> Iterator[Tensor]:
    """The states side by side, (n, S, W), for so many tokens at a time as SCRATCH allows."""
    size = max(1, SCRATCH // (len(states_NW) * states_NW[0].shape[-1]))
    for chunk in zip(*(state.split(size) for state in states_NW), strict=True):
        yield torch.stack(chunk, 1)
