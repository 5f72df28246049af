"""Sinkhorn's algorithm on a small matrix per token, by scaling vectors, with an exact backward pass that keeps only the logits.

    M = exp(logits);   r_0 = 1;   c_i[s] = 1 / sum_t M[t, s] r_(i-1)[t],   r_i[t] = 1 / sum_s M[t, s] c_i[s];   result r[t] M[t, s] c[s]

which are the iterates of normalising columns, then rows, in turn (arXiv 2512.24880, section 4). Backward, with M, r_i and c_i made
again, in logarithms: where g is the gradient on log r_i, that on log M[t, s] and on log c_i[s] gains -r_i[t] M[t, s] c_i[s] g[t], the
latter summed over t; likewise for log c_i. Nothing is approximated by the fixed point: after 20 iterations there may be none.

T rows t, S columns s, N tokens. Tokens come last in memory, so that every operation runs over long vectors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """(..., T, S) -> (..., T, S), rows summing to 1 and columns nearly so."""
    return _Sinkhorn.apply(logits, iterations)


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, iterations: int) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.iterations = iterations
        m_TSN, r, c = _scaling(logits, iterations)
        return _tokens_first(m_TSN * r[-1].unsqueeze(1) * c[-1], logits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        m_TSN, r, c = _scaling(logits, ctx.iterations)
        through_m = m_TSN * r[-1].unsqueeze(1) * c[-1] * _tokens_last(gradient)
        on_r = r[-1] * through_m.sum(1)  # the gradient on log r, times r
        on_c = c[-1] * through_m.sum(0)
        outer = torch.zeros_like(m_TSN)
        for i in reversed(range(ctx.iterations)):
            on_c = on_c - c[i].square() * (m_TSN * on_r.unsqueeze(1)).sum(0)
            outer.addcmul_(on_r.unsqueeze(1), c[i])
            outer.addcmul_(r[i].unsqueeze(1), on_c)
            on_r = -r[i].square() * (m_TSN * on_c).sum(1)
            on_c = 0
        return _tokens_first(through_m - m_TSN * outer, logits), None


def _scaling(logits: Tensor, iterations: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """M (T, S, N), r_0 ... r_K (each (T, N)) and c_1 ... c_K (each (S, N))."""
    m_TSN = _tokens_last(logits)
    m_TSN = (m_TSN - m_TSN.amax(0)).exp()  # a factor per column, which the first normalisation divides out
    r, c = [torch.ones_like(m_TSN[:, 0])], []
    for _ in range(iterations):
        c.append((m_TSN * r[-1].unsqueeze(1)).sum(0).reciprocal())
        r.append((m_TSN * c[-1]).sum(1).reciprocal())
    return m_TSN, r, c


def _tokens_last(matrices: Tensor) -> Tensor:
    return matrices.flatten(0, -3).permute(1, 2, 0).contiguous()


def _tokens_first(matrices_TSN: Tensor, like: Tensor) -> Tensor:
    return matrices_TSN.permute(2, 0, 1).contiguous().view_as(like)
