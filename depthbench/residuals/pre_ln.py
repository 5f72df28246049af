"""Pre-LN: the plain residual stream of Llama-style transformers.

    x_0 = embedding,    x_{k+1} = x_k + F_k(N_k(x_k)),    hidden = N(x_2L)

Source: arXiv 2002.04745, section 3 (Pre-LN); the backbone is Llama's, arXiv 2302.13971, section 2.2.
Shapes: x_k (B, T, D), k the sublayer from 0; N is RMSNorm with weight.

Deviations
- Paper: LayerNorm with bias, learned positions, ReLU feed-forward. Here, as in the reference benchmark: RMSNorm, rotary positions, SwiGLU.
- Meta's Llama rounds the feed-forward width up to a multiple of 256 and rotates neighbouring pairs; here 16, and halves.
- Reference benchmark: weight decay on every parameter; here norms are exempt (as biases and scalars are).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from depthbench.residuals.base import About, SingleStream, Stream


class PreLN(SingleStream):
    """x + F(N(x)); nothing of its own."""

    about = About("baseline", "x + F(N(x))", "fixed", "the stream", "2002.04745")

    def write(self, state: Stream, carry: Any, branch_out: Tensor, emitted: Any, *, sublayer: int) -> Stream:
        return Stream(state.x + branch_out)
