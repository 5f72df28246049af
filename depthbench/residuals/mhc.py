"""Manifold-constrained Hyper-Connections: the mixing of the n residual streams is kept (nearly) doubly stochastic.

    z = rms(vec H) phi^T,   a_j = alpha_j z_j + b_j for j in (pre, post, res)
    H_pre = sigmoid(a_pre),   H_post = 2 sigmoid(a_post),   H_res = SK(mat a_res)
    h = sum_s H_pre[s] H_s,   H+_t = sum_s H_res[t, s] H_s + H_post[t] F_k(N_k(h))
    SK: M_0 = exp(.), then 20 times: columns to sum 1, rows to sum 1

    open: all H_s are the embedding;   hidden = N(sum_s H_s)
    start: phi = 0, alpha = 0.01, b_pre = +gap at stream k mod n, else -gap; b_post = 0; b_res = 0 on the diagonal, else -gap

Source: arXiv 2512.24880, section 4.
Shapes: H (n, D) per token, vec H (n D), phi (2n + n^2, n D); k the sublayer from 0. H_res[new stream, old stream]; rms without weight, one
statistic per token. The rows of H_res sum to 1 up to rounding, its columns as nearly as 20 iterations bring them.

Deviations
- Paper: neither the starting b and phi nor the readout is stated. Here: the reference benchmark's start ("gap-8"), at which the model is
  Pre-LN exactly, and the sum of streams, then the final norm. Equal b_pre at phi = 0 would keep the streams identical forever.
- Reference benchmark: final norm on each stream, then the sum (option ``norm_then_sum``); branches start smaller by sqrt(n)
  (option ``scale_branch_init``); rows first and columns last, in logarithms, on the transpose, which is the same function.
- Weight decay on phi alone: b and alpha are exempt, by analogy with HC's static part.
- Sinkhorn by scaling vectors, H_res = diag(r) M_0 diag(c): the same iterates.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from depthbench.errors import UserError
from depthbench.nn.config import ModelConfig
from depthbench.residuals._sinkhorn import sinkhorn
from depthbench.residuals._streams import HyperConnections, Step, project
from depthbench.residuals.base import About

START_SCALE = 0.01


class MHC(HyperConnections):
    """Manifold-constrained Hyper-Connections.

    streams: how many residual streams
    bias_gap: how far apart the starting logits are: of the stream that is read and the others, of a stream's share of itself and of others
    iterations: of Sinkhorn's algorithm
    scale_branch_init: whether the matrices that end a branch start smaller by the root of the number of streams
    norm_then_sum: whether the final norm comes before the sum over streams
    mix_eps: eps of the norm that the coefficients are computed from (null: norm_eps)
    """

    about = About("hyper-connections", "H_res H + H_post F(N(H_pre H))", "dynamic", "its own mix of n streams", "2512.24880")
    exempt_from_decay = ("bias", "alpha")

    def __init__(
        self,
        config: ModelConfig,
        *,
        streams: int = 4,
        bias_gap: float = 8.0,
        iterations: int = 20,
        scale_branch_init: bool = False,
        norm_then_sum: bool = False,
        mix_eps: float | None = None,
    ) -> None:
        super().__init__(config, streams=streams, scale_branch_init=scale_branch_init, norm_then_sum=norm_then_sum, mix_eps=mix_eps)
        if not (math.isfinite(bias_gap) and bias_gap):
            raise UserError(f"bias_gap is {bias_gap}: give a number other than 0, at which the streams would stay identical forever")
        if iterations < 1:
            raise UserError(f"iterations is {iterations}: give a whole number of at least 1")
        self.iterations = iterations
        self.connections = nn.ModuleList(
            Connection(streams, config.d_model, bias_gap, sublayer=sublayer) for sublayer in range(config.n_sublayer)
        )

    def arguments(self, *, sublayer: int) -> tuple[Any, ...]:
        own = self.connections[sublayer]
        return own.phi, own.bias, own.alpha, self.mix_eps, self.iterations

    @staticmethod
    def step(streams: Tensor, phi: Tensor, bias: Tensor, alpha: Tensor, eps: float, iterations: int) -> tuple[Step, Tensor]:
        n = streams.shape[-2]
        z, flat = project(streams.flatten(-2), phi, eps)
        scale = torch.cat((alpha[0].expand(n), alpha[1].expand(n), alpha[2].expand(n * n)))
        pre, post, res = torch.addcmul(bias, z, scale).split((n, n, n * n), -1)
        mix = sinkhorn(res.unflatten(-1, (n, n)), iterations)
        return Step(read=pre.sigmoid(), mix=mix, write=2 * post.sigmoid()), flat.view_as(streams)

    @classmethod
    def params_extra(cls, shape: Any, *, streams: int = 4, **options: Any) -> int:
        """Per sublayer n^2 + 2n rows of phi and b, and 3 scalars."""
        return 2 * shape.n_layer * ((streams**2 + 2 * streams) * (streams * shape.d_model + 1) + 3)

    @classmethod
    def flops_extra(cls, shape: Any, seq_len: int, *, streams: int = 4, **options: Any) -> int:
        """Multiply-adds per token and sublayer: n D (n^2 + 2n) for the coefficients, and n D to read, n^2 D to mix, n D to write."""
        mixed = streams**2 + 2 * streams
        return 2 * seq_len * 2 * shape.n_layer * shape.d_model * (streams * mixed + mixed)


class Connection(nn.Module):
    """One sublayer's phi, b and alpha. ``sublayer`` counts from 0."""

    def __init__(self, streams: int, width: int, bias_gap: float, *, sublayer: int) -> None:
        super().__init__()
        self.first_read = sublayer % streams
        self.streams, self.bias_gap = streams, bias_gap
        coefficients = streams**2 + 2 * streams
        self.phi = nn.Parameter(torch.empty(coefficients, streams * width))  # rows: pre, post, res with the new stream first
        self.bias = nn.Parameter(torch.empty(coefficients))
        self.alpha = nn.Parameter(torch.empty(3))  # pre, post, res

    @torch.no_grad()
    def reset_parameters(self) -> None:
        n = self.streams
        self.phi.zero_()
        self.alpha.fill_(START_SCALE)
        pre, post, res = self.bias.split((n, n, n * n))
        pre.fill_(-self.bias_gap)[self.first_read] = self.bias_gap
        post.zero_()
        res.view(n, n).fill_(-self.bias_gap).fill_diagonal_(0)
