"""Full Attention Residuals: every sublayer reads its own softmax mix of all that earlier sublayers put out.

    v_0 = embedding,    v_{k+1} = F_k(N_k(h_k)),    h_k = sum_{i<=k} a_{k,i} v_i,    a_{k,i} = softmax_i( w_k . (gamma_k * rms(v_i)) )

There is no other residual path. The readout is one more mix, h_2L, and goes to the final norm.

Source: arXiv 2603.15031, section 3. Shapes: v_i, h_k (B, T, D); w_k, gamma_k (D), a pair per mix k = 1, ..., 2L; h_0 = v_0 has one
source, hence no parameters. It is Block Attention Residuals with one sublayer per group, and shares its code, down to the last bit.

Deviations: those of ``block_attnres``.
"""

from __future__ import annotations

from typing import Any

from depthbench.nn.config import ModelConfig
from depthbench.residuals.base import About
from depthbench.residuals.block_attnres import BlockAttnRes


class FullAttnRes(BlockAttnRes):
    """Softmax over all earlier sublayers.

    mix_eps: eps of the key norms and of the norms that follow a mix, instead of the model's norm_eps.
    """

    about = About("attention residuals", "sum_i a_i v_i; v = F(N(h))", "dynamic", "all earlier outputs", "2603.15031")

    def __init__(self, config: ModelConfig, *, mix_eps: float | None = None) -> None:
        super().__init__(config, group_size=1, mix_eps=mix_eps)

    @classmethod
    def flops_extra(cls, shape: Any, seq_len: int, **options: Any) -> int:
        return super().flops_extra(shape, seq_len, group_size=1)
