"""LayerNorm Scaling: Pre-LN whose norms give less the deeper they stand.

    x_0 = embedding,    x_{k+1} = x_k + F_k(N_k(x_k) / sqrt(b + 1)),    b = floor(k / 2),    hidden = N(x_2L)

Source: arXiv 2502.05795, section 4. Its layers are blocks and count from 1; both norms of a block share one scale.
Shapes: x_k (B, T, D), k the sublayer and b the block from 0; N is RMSNorm with weight. No parameters. The final norm is not scaled.

It is Pre-LN with the gains of block b divided by sqrt(b + 1), at any weights. At initialisation attention's output variance therefore
falls like 1/(b + 1), but SwiGLU's, quadratic for small inputs, like 1/(b + 1)^2, and the stream grows with the logarithm of L.

Deviations
- None from the paper's rule. Like its authors, and unlike its baselines, we start output projections no smaller with depth: that
  would weaken the scaling.
- The authors' code multiplies the norm's output, (B, T, D) numbers; here the gain, D numbers, takes the scale: the same product.
- Probes: when two blocks change places, each takes its scale along.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from depthbench.nn.config import ModelConfig
from depthbench.nn.sublayer import Sublayer, to_compute_dtype
from depthbench.residuals.base import About, Stream
from depthbench.residuals.pre_ln import PreLN


class ScaledSublayer(Sublayer):
    """F(scale N(branch_in)). The scale comes in ``carry``, so that all depths share their compiled graphs."""

    def forward(self, branch_in: Tensor, carry: float, rotation: Tensor) -> tuple[Tensor, Any]:
        x = self.norm.with_gain(branch_in, carry * self.norm.weight)
        return self.core(to_compute_dtype(x), None, rotation)


class LNS(PreLN):
    """x + F(N(x) / sqrt(b + 1))."""

    about = About("normalisation", "x + F(N(x) / sqrt(b+1)), b the block from 0", "fixed", "the stream", "2502.05795")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.scales = [(block + 1) ** -0.5 for block in range(config.n_layer)]

    def build_sublayer(self, config: ModelConfig, *, sublayer: int) -> Sublayer:
        plain = super().build_sublayer(config, sublayer=sublayer)
        return ScaledSublayer(plain.norm, plain.core)

    def read(self, state: Stream, *, sublayer: int) -> tuple[Tensor, float]:
        return state.x, self.scales[sublayer // 2]

    def swap(self, blocks: nn.ModuleList, *, first: int, second: int) -> None:
        super().swap(blocks, first=first, second=second)
        self.scales[first], self.scales[second] = self.scales[second], self.scales[first]
