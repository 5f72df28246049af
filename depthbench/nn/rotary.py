"""Rotary positions (arXiv 2104.09864), rotating the two halves of a head against each other as Hugging Face's Llama does.

Meta's Llama code rotates neighbouring pairs instead: the same function up to a permutation of the rows of the query and key
matrices. With halves, weights compare one to one with Hugging Face's.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

THETA = 10_000.0


@lru_cache(maxsize=16)
def rotation_table(length: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """(2, T, 1, head_dim): cosines, and sines with the sign each half takes.

    A table is an argument of a sublayer, never a buffer: initialisation on the meta device erases buffers. It is made in
    fp64 on the CPU (positions of many thousands lose digits in fp32) and outside inference mode, or one made during
    validation could not be used in training.
    """
    with torch.inference_mode(False):
        position = torch.arange(length, dtype=torch.float64, device="cpu")
        pair = torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu")
        angle = position[:, None] * THETA ** (-pair / head_dim)
        cos, sin = angle.cos(), angle.sin()
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))
        return table.unsqueeze(2).to(dtype).to(device)


def rotation_for(branch_in: Tensor, head_dim: int) -> Tensor:
    """The table for a tensor of shape (B, T, D), in fp32 or, for fp64 models, fp64."""
    dtype = torch.promote_types(branch_in.dtype, torch.float32)
    return rotation_table(branch_in.shape[1], head_dim, branch_in.device, dtype)


def rotate(x_BTHd: Tensor, rotation: Tensor) -> Tensor:
    """Rotates queries or keys to their positions: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)."""
    cos, sin = rotation.unbind()
    swapped = x_BTHd.roll(x_BTHd.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_BTHd * cos, swapped, sin).to(x_BTHd.dtype)
