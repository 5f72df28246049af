"""Sinkhorn's algorithm on a small matrix per token, by scaling vectors, with an exact backward pass that keeps only the logits.

    M = exp(logits);   r_0 = 1;   c_i[s] = 1 / sum_t M[t, s] r_(i-1)[t],   r_i[t] = 1 / sum_s M[t, s] c_i[s];   result r[t] M[t, s] c[s]

which are the iterates of normalising columns, then rows, in turn (arXiv 2512.24880, section 4).

Backward makes M, r_i and c_i again and goes through them from the last to the first, in logarithms. With x = dL/d log r_i:

    dL/d log M[t, s]  and  dL/d log c_i[s], the latter summed over t,  gain  -r_i[t] M[t, s] c_i[s] x[t]

and likewise from c_i to M and r_(i-1). Nothing is taken from the fixed point: where logits lie far apart, 20 iterations do not reach it.

T rows t (new streams), S columns s (old streams), N tokens. Tokens come last in memory, so that every operation runs over long vectors;
all r are (T, 1, N) and all c (1, S, N).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """(..., T, S) -> (..., T, S): rows sum to 1 up to rounding, columns as nearly as the iterations bring them."""
    return _Sinkhorn.apply(logits, iterations)


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.iterations = iterations
        m, r, c = _scaling(logits, iterations)
        return _tokens_first(m * r[-1] * c[-1], logits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        m, r, c = _scaling(logits, ctx.iterations)
        direct = m * r[-1] * c[-1] * _tokens_last(gradient)  # on log M, were r and c constants
        on_r = r[-1] * direct.sum(1, keepdim=True)  # r_i dL/d log r_i
        on_c = c[-1] * direct.sum(0, keepdim=True)  # c_i dL/d log c_i: the result has a part in it for the last i alone
        through_sums = torch.zeros_like(direct)
        for i in reversed(range(ctx.iterations)):  # r[i + 1] came from c[i], which came from r[i]
            on_c = on_c - (m * on_r).sum(0, keepdim=True) * c[i].square()
            through_sums.addcmul_(on_r, c[i]).addcmul_(r[i], on_c)
            on_r = -(m * on_c).sum(1, keepdim=True) * r[i].square()
            on_c = 0.0
        return _tokens_first(direct - m * through_sums, logits), None


def _scaling(logits: Tensor, iterations: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """M, r_0 ... r_K and c_1 ... c_K, however far the logits lie apart.

    A factor per column is taken from M, which the first normalisation would divide out; then one per row, which r_0 takes in its place.
    """
    m = _tokens_last(logits)
    m = m - m.amax(0)
    of_row = m.amax(1, keepdim=True)
    m = (m - of_row).exp_()
    r, c = [of_row.exp_()], []
    for _ in range(iterations):
        c.append((m * r[-1]).sum(0, keepdim=True).reciprocal())
        r.append((m * c[-1]).sum(1, keepdim=True).reciprocal())
    return m, r, c


def _tokens_last(matrices: Tensor) -> Tensor:
    """(..., T, S) -> (T, S, N)"""
    return matrices.reshape(-1, *matrices.shape[-2:]).permute(1, 2, 0).contiguous()


def _tokens_first(matrices_TSN: Tensor, like: Tensor) -> Tensor:
    return matrices_TSN.permute(2, 0, 1).contiguous().view_as(like)
