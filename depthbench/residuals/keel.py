"""KEEL: a norm before the sublayer and one after the addition, the residual connection scaled up between them.

    x_1     = x_0 + F_0(N_0(x_0)),                    x_0 the embedding
    x_2     = N'_1(x_1 + F_1(N_1(x_1)))
    x_{k+1} = N'_k(alpha x_k + F_k(N_k(x_k))),        k >= 2,    alpha = 2L
    hidden  = N(x_2L)

Source: arXiv 2601.19895, section 3. Its L counts sublayers: alpha = L there is 2L here.
Shapes: x_k (B, T, D), k the sublayer from 0; N and N' are RMSNorm with weight, N' one more for every sublayer but the first.

Only the first attention has no outer norm, and only the first block has no alpha. N'(alpha x + F) = N'(x + F / alpha): later blocks add
little at first. The gradient of block 0, which has no alpha, is hundreds of times that of any other block (210 at L = 6, 1600 at 48), so
that clipping by the global norm acts on block 0 alone.

Deviations
- Paper: nothing is said of a norm after the last outer norm. Here, as in the reference benchmark, the final norm of all designs is kept.
- Paper, in a footnote: alpha may be tuned, above 1. Here the option ``alpha``.
- Some public ports leave the outer norm out of the whole first block; paper, reference benchmark and this file only out of its attention.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from depthbench.errors import UserError
from depthbench.nn.config import ModelConfig
from depthbench.residuals._outer_norm import NormedStream, OuterNorm
from depthbench.residuals.base import About


class KEEL(NormedStream):
    """N'(alpha x + F(N(x))).

    alpha: the weight of the residual connection from the second block on; null: 2L
    """

    about = About("normalisation", "N'(alpha x + F(N(x))), alpha = 2L", "fixed", "the stream", "2601.19895")

    def __init__(self, config: ModelConfig, *, alpha: float | None = None) -> None:
        super().__init__(config)
        if alpha is not None and not 0 < alpha < math.inf:
            raise UserError(f"alpha is {alpha}: give a number above 0, or null for 2L")
        self.alpha = float(config.n_sublayer) if alpha is None else alpha
        self.outer_norms = nn.ModuleDict(
            {str(sublayer): OuterNorm(config.d_model, config.norm_eps) for sublayer in range(1, config.n_sublayer)}
        )

    def alpha_at(self, sublayer: int) -> float:
        return 1.0 if sublayer < 2 else self.alpha

    def outer_norm(self, sublayer: int) -> OuterNorm | None:
        return self.outer_norms[str(sublayer)] if sublayer else None

    def mean_square(self, mixed: Tensor) -> Tensor:
        return mixed.square().mean(-1, keepdim=True)

    @classmethod
    def params_extra(cls, shape: Any, **options: Any) -> int:
        return (2 * shape.n_layer - 1) * shape.d_model
