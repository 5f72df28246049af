"""Causal attention with grouped key/value heads.

B batch, T time, D width, H query heads, K key/value heads, d head width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from depthbench.nn.config import ModelConfig
from depthbench.nn.layers import Linear, RMSNorm
from depthbench.nn.rotary import rotate


class Attention(nn.Module):
    """The bare sublayer, without the norm before it: causal softmax attention, scale 1/sqrt(d), optional QK-norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.grouped = config.n_kv_head != config.n_head
        kv_width = config.n_kv_head * config.head_dim
        self.q_proj = Linear(config.d_model, config.d_model)
        self.k_proj = Linear(config.d_model, kv_width)
        self.v_proj = Linear(config.d_model, kv_width)
        self.o_proj = Linear(config.d_model, config.d_model)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, T, H, d), keys and values (B, T, K, d): after QK-norm, before rotation."""
        heads = (-1, self.head_dim)
        q, k, v = (projection(x_BTD).unflatten(-1, heads) for projection in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def forward(self, x_BTD: Tensor, carry: Any, rotation: Tensor) -> tuple[Tensor, None]:
        q, k, v = self.project(x_BTD)
        q, k = rotate(q, rotation), rotate(k, rotation)
        out_BHTd = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=self.grouped
        )
        return self.o_proj(out_BHTd.transpose(1, 2).flatten(2)), None
