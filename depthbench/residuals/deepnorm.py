"""DeepNorm: Post-LN with a stronger residual connection and smaller initial branches.

    x_0 = embedding,    x_{k+1} = LN_k(alpha x_k + F_k(x_k)),    hidden = N(x_2L)
    alpha = (2L)^(1/4),    beta = (8L)^(-1/4)

Source: arXiv 2203.00555, Figure 2 (the rule, and alpha and beta of decoder-only models); L counts blocks.
Shapes: x_k (B, T, D), k the sublayer from 0; LN is LayerNorm with weight, N the RMSNorm all designs end with. No input norms: as many
parameters as Pre-LN. beta scales the initial spread of the value, output, gate, up and down matrices, alpha stays for good.

LN(alpha x + F) = LN(x + F / alpha): it is Post-LN with output projections divided by alpha. alpha beta = 2^(-1/2) at any depth.

Deviations
- Paper: Xavier normal with gain beta. Here, as in the reference benchmark, our truncated normal with its spread times beta.
- Paper: feed-forwards of two matrices. Scaling all three of SwiGLU, as here and in the reference benchmark, makes its output about
  beta^3 rather than beta^2 of the unscaled one.
- Paper: LayerNorm with bias; here, as in the reference benchmark, without.
- Paper: no norm after the last. Here, as in the reference benchmark, the final norm of all designs is kept.
- torchscale divides after a Xavier uniform, by the same number.
"""

from __future__ import annotations

from torch import Tensor, nn

from depthbench.nn.config import ModelConfig
from depthbench.nn.layers import LayerNorm
from depthbench.nn.sublayer import Sublayer
from depthbench.residuals._outer_norm import NormedStream
from depthbench.residuals.base import About

SCALED = ("v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class DeepNorm(NormedStream):
    """LN(alpha x + F(x))."""

    about = About("normalisation", "LN(alpha x + F(x)), alpha = (2L)^(1/4)", "fixed", "the stream", "2203.00555")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.alpha = (2 * config.n_layer) ** 0.25
        self.beta = (8 * config.n_layer) ** -0.25
        self.norms = nn.ModuleList(LayerNorm(config.d_model, config.norm_eps) for _ in range(config.n_sublayer))

    def build_sublayer(self, config: ModelConfig, *, sublayer: int) -> Sublayer:
        built = super().build_sublayer(config, sublayer=sublayer)
        built.norm = None
        for name, matrix in built.core.named_children():
            if name in SCALED:
                matrix.std *= self.beta
        return built

    def alpha_at(self, sublayer: int) -> float:
        return self.alpha

    def outer_norm(self, sublayer: int) -> LayerNorm:
        return self.norms[sublayer]

    def mean_square(self, mixed: Tensor) -> Tensor:
        return mixed.var(-1, correction=0, keepdim=True)
