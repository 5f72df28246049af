"""What the designs with norms behind the sublayer share.

``OuterNorm`` is RMSNorm, quicker in eager mode on a CPU. ``NormedStream`` is one stream that is normed after the addition:

    x_{k+1} = N'_k(alpha_k x_k + F_k),    or alpha_k x_k + F_k where sublayer k has no outer norm

The outer norm belongs to its block and changes places with it; alpha, and whether there is a norm at all, belong to the position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd
from torch.autograd.function import once_differentiable

from depthbench.nn.layers import RMSNorm
from depthbench.residuals.base import LinearForm, SingleStream, State, Stream


class EagerRMSNorm(torch.autograd.Function):
    """RMSNorm of x (..., D) with weight (D), r = 1/sqrt(mean(x^2) + eps), in three passes forward and two back.

    LayerNorm's backward is one fused pass. Told that the mean is 0 and 1/std is r, it gives RMSNorm's gradient less r mean(weight grad),
    the part that centring would have removed. There are no second derivatives. Not for halves: the square of a vector's length is beyond
    them soon.
    """

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (x * r).mul_(weight)

    @staticmethod
    @custom_bwd(device_type="cpu")
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, r = ctx.saved_tensors
        grad_x, grad_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, x, weight.shape, torch.zeros_like(r), r, weight, None, [True, True, False]
        )
        return grad_x.add_(r * (grad @ weight / len(weight)).unsqueeze(-1)), grad_weight, None


class OuterNorm(RMSNorm):
    """RMSNorm. Compilers and GPUs have fused forms of their own, and halves are normed in fp32 there."""

    def with_gain(self, x: Tensor, gain: Tensor) -> Tensor:
        if x.device.type != "cpu" or gain.dtype not in (torch.float32, torch.float64) or torch.compiler.is_compiling():
            return super().with_gain(x, gain)
        return EagerRMSNorm.apply(x.to(gain.dtype), gain, self.eps).to(x.dtype)


class NormedStream(SingleStream):
    """The subclass names its alphas and norms by sublayer (from 0), and the statistic that its norms divide by the root of."""

    def alpha_at(self, sublayer: int) -> float:
        raise NotImplementedError

    def outer_norm(self, sublayer: int) -> RMSNorm | None:
        raise NotImplementedError

    def mean_square(self, mixed: Tensor) -> Tensor:
        """(B, T, 1), of what the outer norm divides."""
        raise NotImplementedError

    def write(self, state: Stream, carry: Any, branch_out: Tensor, emitted: Any, *, sublayer: int) -> Stream:
        mixed = torch.add(branch_out, state.x, alpha=self.alpha_at(sublayer))
        norm = self.outer_norm(sublayer)
        return Stream(mixed if norm is None else norm(mixed))

    def swap_parameters(self, blocks: nn.ModuleList, *, block: int) -> dict[str, Tensor]:
        moving = super().swap_parameters(blocks, block=block)
        for kind, sublayer in (("attention", 2 * block), ("feed_forward", 2 * block + 1)):
            if (norm := self.outer_norm(sublayer)) is not None:
                moving[f"{kind}.outer_norm.weight"] = norm.weight
        return moving

    def linear(self, state: State, *, sublayer: int, branch_out: Tensor | None = None) -> LinearForm | None:
        """One slot. With s = 1/sqrt(mean_square + eps) of alpha x + branch_out, the token's own: mix = alpha s, write = s.

        Exact for unit gains: a gain weighs channels one by one, and no weight per token does that. Where the norm centres, the sum of the
        parts is exact after each is centred. In no less than fp32: factors near 1, a bf16 rounding each, would add up over depth.
        """
        norm = None if sublayer == self.config.n_sublayer else self.outer_norm(sublayer)
        if norm is None:
            return super().linear(state, sublayer=sublayer)
        alpha = self.alpha_at(sublayer)
        wide = torch.promote_types(state.x.dtype, torch.float32)
        s_BT1 = (self.mean_square(torch.add(branch_out.to(wide), state.x.to(wide), alpha=alpha)) + norm.eps).rsqrt()
        return LinearForm(s_BT1.new_ones(1, 1, 1), (alpha * s_BT1).unsqueeze(-1), s_BT1)

    def linear_note(self) -> str:
        norms = filter(None, (self.outer_norm(sublayer) for sublayer in range(self.config.n_sublayer)))
        return "" if all((norm.weight == 1).all() for norm in norms) else "gains of the outer norms left out"
