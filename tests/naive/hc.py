"""Hyper-Connections, naive: einsums over n streams, nothing fused or reused. The executable specification.

    h = A_m^T H,    H+ = A_r^T H + B^T F_k(N_k(h)),    A, B = static + scale tanh(rms(H) W)

Source: arXiv 2409.19606. A_r's first index is the old stream. B batch, T time, D width; s old stream, n new stream.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from depthbench.residuals.base import LinearForm
from tests.naive._streams import NaiveStreams, Streams


class Connection(nn.Module):
    def __init__(self, streams, width, dynamic, sublayer) -> None:
        super().__init__()
        self.first_read = sublayer % streams
        self.static_alpha, self.static_beta = nn.Parameter(torch.empty(streams, streams + 1)), nn.Parameter(torch.empty(streams))
        if dynamic:
            self.dynamic = nn.Parameter(torch.empty(streams + 2, width))
            self.scale_alpha, self.scale_beta = nn.Parameter(torch.empty(())), nn.Parameter(torch.empty(()))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        n = len(self.static_beta)
        self.static_alpha.copy_(torch.cat((torch.eye(n)[:, [self.first_read]], torch.eye(n)), 1))
        self.static_beta.fill_(1)
        if hasattr(self, "dynamic"):
            self.dynamic.zero_()
            self.scale_alpha.fill_(0.01)
            self.scale_beta.fill_(0.01)


class NaiveHC(NaiveStreams):
    def __init__(self, config, *, streams: int = 4, dynamic: bool = True) -> None:
        super().__init__(config)
        self.streams, self.dynamic = streams, dynamic
        self.connections = nn.ModuleList(Connection(streams, config.d_model, dynamic, k) for k in range(config.n_sublayer))

    def coefficients(self, H, sublayer):
        """A_m (B, T, s), A_r (B, T, s, n) and B (B, T, n)."""
        own = self.connections[sublayer]
        A_m, A_r, B = own.static_alpha[:, 0], own.static_alpha[:, 1:], own.static_beta
        if not self.dynamic:
            return A_m.expand(*H.shape[:2], -1), A_r.expand(*H.shape[:2], -1, -1), B.expand(*H.shape[:2], -1)
        with torch.autocast(H.device.type, enabled=False):
            normed = F.rms_norm(H, H.shape[-1:], eps=self.config.norm_eps)
            A_m = A_m + own.scale_alpha * torch.einsum("btsd,d->bts", normed, own.dynamic[0]).tanh()
            A_r = A_r + own.scale_alpha * torch.einsum("btsd,nd->btsn", normed, own.dynamic[1:-1]).tanh()
            B = B + own.scale_beta * torch.einsum("btnd,d->btn", normed, own.dynamic[-1]).tanh()
        return A_m, A_r, B

    def read(self, state, *, sublayer):
        A_m, A_r, B = self.coefficients(state.H, sublayer)
        with torch.autocast(state.H.device.type, enabled=False):
            return torch.einsum("bts,btsd->btd", A_m, state.H), (A_r, B)

    def write(self, state, carry, branch_out, emitted, *, sublayer):
        A_r, B = carry
        with torch.autocast(state.H.device.type, enabled=False):
            mixed = torch.einsum("btsn,btsd->btnd", A_r, state.H)
        return Streams(mixed + torch.einsum("btn,btd->btnd", B, branch_out.to(B.dtype)))

    def linear(self, state, *, sublayer, branch_out=None):
        if sublayer == self.config.n_sublayer:
            return LinearForm(state.H.new_ones(1, 1, self.streams), None, None)
        A_m, A_r, B = self.coefficients(state.H, sublayer)
        return LinearForm(A_m, A_r.mT, B)

    def no_decay_parameters(self):
        return [parameter for own in self.connections for parameter in (own.static_alpha, own.static_beta)]

    @classmethod
    def params_extra(cls, shape, *, streams=4, dynamic=True):
        return 2 * shape.n_layer * (streams * (streams + 2) + dynamic * (shape.d_model * (streams + 2) + 2))


NAIVE = NaiveHC
