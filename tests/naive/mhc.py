"""Manifold-constrained Hyper-Connections, naive: einsums over n streams, normalisation in turn. The executable specification.

    x+ = H_res x + H_post^T F_k(N_k(H_pre x)),    H_pre = sigmoid, H_post = 2 sigmoid, H_res = Sinkhorn of alpha rms(vec x) phi^T + b

Source: arXiv 2512.24880. H_res's first index is the new stream. B batch, T time, D width; s old stream, n new stream.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from depthbench.residuals.base import LinearForm
from tests.naive._streams import NaiveStreams, Streams


def sinkhorn(logits, iterations):
    """Columns first, rows last. The largest logit is taken off, which the first normalisation undoes."""
    matrix = (logits - logits.amax((-2, -1), keepdim=True)).exp()
    for _ in range(iterations):
        matrix = matrix / matrix.sum(-2, keepdim=True)
        matrix = matrix / matrix.sum(-1, keepdim=True)
    return matrix


class Connection(nn.Module):
    def __init__(self, streams, width, bias_gap, sublayer) -> None:
        super().__init__()
        self.streams, self.bias_gap, self.first_read = streams, bias_gap, sublayer % streams
        size = streams * streams + 2 * streams
        self.phi, self.bias = nn.Parameter(torch.empty(size, streams * width)), nn.Parameter(torch.empty(size))
        self.alpha = nn.Parameter(torch.empty(3))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        read = torch.full((self.streams,), -self.bias_gap)
        read[self.first_read] = self.bias_gap
        res = -self.bias_gap * (1 - torch.eye(self.streams))
        self.bias.copy_(torch.cat((read, torch.zeros(self.streams), res.flatten())))
        self.phi.zero_()
        self.alpha.fill_(0.01)


class NaiveMHC(NaiveStreams):
    def __init__(self, config, *, streams: int = 4, bias_gap: float = 8.0, iterations: int = 20) -> None:
        super().__init__(config)
        self.streams, self.iterations = streams, iterations
        self.connections = nn.ModuleList(Connection(streams, config.d_model, bias_gap, k) for k in range(config.n_sublayer))

    def coefficients(self, x, sublayer):
        """H_pre (B, T, s), H_res (B, T, n, s) and H_post (B, T, n)."""
        own, n = self.connections[sublayer], self.streams
        with torch.autocast(x.device.type, enabled=False):
            flat = x.flatten(-2)
            z = torch.einsum("btk,jk->btj", F.rms_norm(flat, flat.shape[-1:], eps=self.config.norm_eps), own.phi)
        parts, biases = z.split((n, n, n * n), -1), own.bias.split((n, n, n * n))
        pre, post, res = (alpha * part + bias for alpha, part, bias in zip(own.alpha, parts, biases, strict=True))
        return pre.sigmoid(), sinkhorn(res.unflatten(-1, (n, n)), self.iterations), 2 * post.sigmoid()

    def read(self, state, *, sublayer):
        H_pre, H_res, H_post = self.coefficients(state.H, sublayer)
        with torch.autocast(state.H.device.type, enabled=False):
            return torch.einsum("bts,btsd->btd", H_pre, state.H), (H_res, H_post)

    def write(self, state, carry, branch_out, emitted, *, sublayer):
        H_res, H_post = carry
        with torch.autocast(state.H.device.type, enabled=False):
            mixed = torch.einsum("btns,btsd->btnd", H_res, state.H)
        return Streams(mixed + torch.einsum("btn,btd->btnd", H_post, branch_out.to(H_post.dtype)))

    def linear(self, state, *, sublayer, branch_out=None):
        if sublayer == self.config.n_sublayer:
            return LinearForm(state.H.new_ones(1, 1, self.streams), None, None)
        return LinearForm(*self.coefficients(state.H, sublayer))

    @classmethod
    def params_extra(cls, shape, *, streams=4, **options):
        return 2 * shape.n_layer * ((streams**2 + 2 * streams) * (streams * shape.d_model + 1) + 3)


NAIVE = NaiveMHC
