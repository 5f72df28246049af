"""The gated feed-forward sublayer (SwiGLU, arXiv 2002.05202)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from depthbench.nn.config import ModelConfig
from depthbench.nn.layers import Linear


class SwiGLU(nn.Module):
    """The bare sublayer, without the norm before it: down(silu(gate(x)) * up(x)), (B, T, D) -> (B, T, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.d_model, config.d_ff)
        self.up_proj = Linear(config.d_model, config.d_ff)
        self.down_proj = Linear(config.d_ff, config.d_model)

    def forward(self, x_BTD: Tensor, carry: Any, rotation: Tensor) -> tuple[Tensor, None]:
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD)), None
