"""Sandwich-LN (Peri-LN): a norm on either side of each sublayer, both inside the residual branch.

    x_0 = embedding,    x_{k+1} = x_k + N'_k(F_k(N_k(x_k))),    hidden = N(x_2L)

Source: arXiv 2105.13290 (CogView), section 2.4; analysed as Peri-LN in arXiv 2502.02732.
Shapes: x_k (B, T, D), k the sublayer from 0; N and N' are RMSNorm with weight, N' one more per sublayer.

Each sublayer adds unit variance while the gains are 1, so E[x^2] is 2L at the end. The size of the output projections does not
matter: a factor on one changes nothing but its own gradient, which shrinks by it.

Deviations
- CogView: LayerNorm that first divides by the largest value (an fp16 measure), output projections started smaller with depth. Here
  RMSNorm as in Peri-LN, and the initialisation of every other design.
- Peri-LN may also norm the embedding; the reference benchmark and OLMo-core's block do not, nor does this.
- OLMo 2's "reordered norm" keeps N' only: another design.
"""

from __future__ import annotations

from typing import Any

from depthbench.nn.config import ModelConfig
from depthbench.nn.sublayer import Sublayer
from depthbench.residuals._outer_norm import OuterNorm
from depthbench.residuals.base import About
from depthbench.residuals.pre_ln import PreLN


class SandwichLN(PreLN):
    """x + N'(F(N(x)))."""

    about = About("normalisation", "x + N'(F(N(x)))", "fixed", "the stream", "2105.13290")

    def build_sublayer(self, config: ModelConfig, *, sublayer: int) -> Sublayer:
        built = super().build_sublayer(config, sublayer=sublayer)
        built.output_norm = OuterNorm(config.d_model, config.norm_eps)
        return built

    @classmethod
    def params_extra(cls, shape: Any, **options: Any) -> int:
        return 2 * shape.n_layer * shape.d_model
