"""F, the sublayer that a residual design reads for and writes from, and the block, which is two of them.

    F(branch_in, carry, rotation) -> (branch_out, emitted)

``branch_in`` (B, T, D) is what the design read from the depth state, un-normalised; ``branch_out`` (B, T, D) is the term as
it is added, after an output norm and before any alpha or beta. ``carry`` is whatever the design's ``read`` handed over and
``emitted`` whatever its ``write`` wants back; most designs use neither. A core is a module with the same signature that
takes the normalised ``branch_in``.

A number that differs from block to block (a scale per depth) belongs into ``carry``: as an attribute it would cost a compiled
graph per block.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn


def to_compute_dtype(x: Tensor) -> Tensor:
    """Under autocast, the cast that every projection would make for itself (and save for backward), made once."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) and x.dtype == torch.float32 else x


class Sublayer(nn.Module):
    """Input norm, core (attention or feed-forward), output norm; either norm may be None."""

    regions: ClassVar[tuple[str, ...]] = ("forward",)  # the methods that torch.compile may take as a whole

    def __init__(self, norm: nn.Module | None, core: nn.Module, output_norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = norm
        self.core = core
        self.output_norm = output_norm

    def forward(self, branch_in: Tensor, carry: Any, rotation: Tensor) -> tuple[Tensor, Any]:
        x = branch_in if self.norm is None else self.norm(branch_in)
        branch_out, emitted = self.core(to_compute_dtype(x), carry, rotation)
        return branch_out if self.output_norm is None else self.output_norm(branch_out), emitted


class Block(nn.Module):
    """Attention and feed-forward. It only holds them: the model walks sublayers, and the design connects them."""

    def __init__(self, attention: Sublayer, feed_forward: Sublayer) -> None:
        super().__init__()
        self.attention = attention
        self.feed_forward = feed_forward
