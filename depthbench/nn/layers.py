"""Matrices, embedding and norms, each with its initialisation in one place.

Every matrix, the embedding and the head included, starts as a normal of standard deviation 0.02 cut at three standard
deviations, unless a recipe has others. There is no depth-scaled output projection in any design: it would starve Attention
Residuals of signal (the norms' eps takes over) and cancel LayerNorm Scaling.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

INIT_STD = 0.02
INIT_CUTOFF = 3.0  # in standard deviations


def truncated_normal_(weight: Tensor, std: float, cutoff: float) -> None:
    nn.init.trunc_normal_(weight, std=std, a=-cutoff * std, b=cutoff * std)


class Linear(nn.Linear):
    """A matrix without bias. A design that wants another spread at initialisation sets ``std`` on the instance."""

    std: float = INIT_STD
    cutoff: float = INIT_CUTOFF

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        truncated_normal_(self.weight, self.std, self.cutoff)


class Embedding(nn.Embedding):
    std: float = INIT_STD
    cutoff: float = INIT_CUTOFF

    def reset_parameters(self) -> None:
        truncated_normal_(self.weight, self.std, self.cutoff)


class RMSNorm(nn.Module):
    """x (..., width) -> weight * x / sqrt(mean(x^2) + eps), computed in the weight's precision and given back in x's."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.with_gain(x, self.weight)

    def with_gain(self, x: Tensor, gain: Tensor) -> Tensor:
        """The norm with another gain (width) in the weight's place."""
        return F.rms_norm(x.to(gain.dtype), gain.shape, gain, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class LayerNorm(RMSNorm):
    """x (..., width) -> weight * (x - mean(x)) / sqrt(var(x) + eps): centred, without bias; precisions as in RMSNorm."""

    def with_gain(self, x: Tensor, gain: Tensor) -> Tensor:
        return F.layer_norm(x.to(gain.dtype), gain.shape, gain, None, self.eps).to(x.dtype)
