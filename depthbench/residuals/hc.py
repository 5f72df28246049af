"""Hyper-Connections: n residual streams; every sublayer learns what to read, how to mix the streams, and where to write.

    A_m = A_m,static + s_alpha tanh(rms(H) W_m),   A_r = A_r,static + s_alpha tanh(rms(H) W_r)
    B   = B_static + s_beta tanh(rms(H) W_beta)
    h   = sum_s A_m[s] H_s,      H+_t = sum_s A_r[s, t] H_s + B[t] F_k(N_k(h))

    open: all H_s are the embedding;   hidden = N(sum_s H_s);   start: W = 0, B = 1, A_r = I, A_m = e_(k mod n), s = 0.01

Source: arXiv 2409.19606, sections 2 and 3, Eq. 14 (start), Algorithm 2.
Shapes: H (n, D) per token; rms divides each stream by its root mean square; W_m, W_beta (D), W_r (D, n); k the sublayer from 0. Row s of
the coefficients comes from stream s alone. A_r's first index is the old stream, that of ``Step.mix`` the new one.

Deviations
- Paper: the std of the branches' output matrices is scaled by sqrt(n) at the start, in a direction that it does not state. Either way
  the model would not start as Pre-LN, which Eq. 14 claims and which it does here. Option ``scale_branch_init`` divides, as the reference
  benchmark does.
- Paper, Algorithm 2: the inner norm is a LayerNorm, its OLMo runs use the model's norm without weight. Here: RMS without weight.
- Reference benchmark: the final norm on each stream, then the sum; option ``norm_then_sum``.
- Weight decay as in the paper: never on the static part, always on W.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from depthbench.nn.config import ModelConfig
from depthbench.residuals._streams import HyperConnections, Step, project
from depthbench.residuals.base import About

START_SCALE = 0.01


class HC(HyperConnections):
    """Hyper-Connections, dynamic or static.

    streams: how many residual streams
    dynamic: whether the coefficients depend on the token
    scale_branch_init: whether the matrices that end a branch start smaller by the root of the number of streams
    norm_then_sum: whether the final norm comes before the sum over streams
    mix_eps: eps of the norm that the coefficients are computed from (null: norm_eps)
    """

    about = About("hyper-connections", "A_r^T H + B^T F(N(A_m^T H))", "dynamic", "its own mix of n streams", "2409.19606")
    exempt_from_decay = ("static_alpha", "static_beta")

    def __init__(
        self,
        config: ModelConfig,
        *,
        streams: int = 4,
        dynamic: bool = True,
        scale_branch_init: bool = False,
        norm_then_sum: bool = False,
        mix_eps: float | None = None,
    ) -> None:
        super().__init__(config, streams=streams, scale_branch_init=scale_branch_init, norm_then_sum=norm_then_sum, mix_eps=mix_eps)
        self.connections = nn.ModuleList(
            Connection(streams, config.d_model, dynamic=dynamic, sublayer=sublayer) for sublayer in range(config.n_sublayer)
        )

    def arguments(self, *, sublayer: int) -> tuple[Any, ...]:
        own = self.connections[sublayer]
        return own.static_alpha, own.static_beta, own.dynamic, own.scale_alpha, own.scale_beta, self.mix_eps

    @staticmethod
    def step(
        streams: Tensor,
        alpha: Tensor,
        beta: Tensor,
        dynamic: Tensor | None,
        scale_alpha: Tensor | None,
        scale_beta: Tensor | None,
        eps: float,
    ) -> tuple[Step, Tensor]:
        if dynamic is None:
            tokens = streams.shape[:2]
            alpha, beta = alpha.expand(*tokens, -1, -1), beta.expand(*tokens, -1)
        else:
            z, streams = project(streams, dynamic, eps)
            to_alpha, to_beta = z.tanh().split((alpha.shape[1], 1), -1)
            alpha, beta = alpha + scale_alpha * to_alpha, beta + scale_beta * to_beta.squeeze(-1)
        return Step(read=alpha[..., 0], mix=alpha[..., 1:].mT, write=beta), streams

    @classmethod
    def params_extra(cls, shape: Any, *, streams: int = 4, dynamic: bool = True, **options: Any) -> int:
        """Per sublayer n (n + 2) static numbers; dynamic: (n + 2) D weights and 2 scalars."""
        static = streams * (streams + 2)
        return 2 * shape.n_layer * (static + dynamic * ((streams + 2) * shape.d_model + 2))

    @classmethod
    def flops_extra(cls, shape: Any, seq_len: int, *, streams: int = 4, dynamic: bool = True, **options: Any) -> int:
        """Multiply-adds per token and sublayer: n D (n + 2) for the dynamic coefficients, n D to read, n^2 D to mix, n D to write."""
        coefficients = dynamic * (streams + 2)
        return 2 * seq_len * 2 * shape.n_layer * streams * shape.d_model * (coefficients + 1 + streams + 1)


class Connection(nn.Module):
    """One sublayer's coefficients. ``sublayer`` counts from 0."""

    def __init__(self, streams: int, width: int, *, dynamic: bool, sublayer: int) -> None:
        super().__init__()
        self.first_read = sublayer % streams
        self.static_alpha = nn.Parameter(torch.empty(streams, streams + 1))  # [old stream, (A_m | A_r to each new stream)]
        self.static_beta = nn.Parameter(torch.empty(streams))
        self.dynamic = nn.Parameter(torch.empty(streams + 2, width)) if dynamic else None  # rows: W_m, W_r to each new stream, W_beta
        self.scale_alpha = nn.Parameter(torch.empty(())) if dynamic else None
        self.scale_beta = nn.Parameter(torch.empty(())) if dynamic else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.static_alpha.zero_()
        self.static_alpha[self.first_read, 0] = 1
        self.static_alpha[:, 1:].fill_diagonal_(1)
        self.static_beta.fill_(1)
        if self.dynamic is not None:
            self.dynamic.zero_()
            self.scale_alpha.fill_(START_SCALE)
            self.scale_beta.fill_(START_SCALE)
