"""Full Attention Residuals, naive: all sources in one stack. The executable specification, and a proof of the interface.

    v_0 = embedding,    v_{k+1} = F_k(N_k(h_k)),    h_k = sum_i a_{k,i} v_i,    a_{k,i} = softmax_i( w_k . (gamma_k * rms(v_i)) )

Source: arXiv 2603.15031, section 3. Shapes: v_i (B, T, D); w_k, gamma_k (D), one pair per mix k = 1, ..., 2L (2L is the readout);
h_0 = v_0 has one source, hence no mix.

The depth state is an un-normalised mix, so no tensor of the state carries the whole gradient on it: ``depth_gradient`` is the gradient
on the newest source, which reaches the loss through every later mix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from depthbench.residuals.base import LinearForm, Residual


class Sources(NamedTuple):
    sources: Tensor  # (n, B, T, D)
    newest_only: bool = False  # after a skip by the reference rule: the next mix is the newest source itself


class NaiveFullAttnRes(Residual):
    skip_rules = ("reference", "renormalise")

    def __init__(self, config) -> None:
        super().__init__(config)
        self.queries = nn.Parameter(torch.empty(config.n_sublayer, config.d_model))  # row k - 1 belongs to mix k
        self.key_norms = nn.Parameter(torch.empty(config.n_sublayer, config.d_model))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.queries)
        nn.init.ones_(self.key_norms)

    def weights(self, state, sublayer: int) -> Tensor:
        """Share of each source in what ``sublayer`` reads, (n, B, T)."""
        if state.newest_only or len(state.sources) == 1:
            shares = torch.zeros_like(state.sources[..., 0])
            return torch.cat((shares[:-1], torch.ones_like(shares[-1:])))
        scale = (state.sources.square().mean(-1, keepdim=True) + self.config.norm_eps).rsqrt()
        return (state.sources * scale * self.key_norms[sublayer - 1] * self.queries[sublayer - 1]).sum(-1).softmax(0)

    def mixed(self, state, sublayer: int) -> Tensor:
        return (self.weights(state, sublayer).unsqueeze(-1) * state.sources).sum(0)

    def open(self, embedding):
        return Sources(embedding.unsqueeze(0))

    def read(self, state, *, sublayer):
        return self.mixed(state, sublayer), None

    def write(self, state, carry, branch_out, emitted, *, sublayer):
        return Sources(torch.cat((state.sources, branch_out.unsqueeze(0))))

    def depth_state(self, state, *, block):
        return self.mixed(state, 2 * block)

    def depth_gradient(self, gradients, *, block):
        return gradients.sources[-1]

    def readout(self, state, *, block):
        return self.mixed(state, 2 * block)

    def skip(self, state, *, block, rule=None):
        return state._replace(newest_only=True) if self.skip_rule(rule) == "reference" else state

    def swap_parameters(self, blocks, *, block):
        tables = {"query": self.queries, "key_norm": self.key_norms}
        own = {f"{name}_{mix}": table[2 * block + mix] for name, table in tables.items() for mix in (0, 1)}  # inside, and on the right
        return super().swap_parameters(blocks, block=block) | own

    def linear(self, state, *, sublayer, branch_out=None):
        read = self.weights(state, sublayer).movedim(0, -1)
        if sublayer == self.config.n_sublayer:
            return LinearForm(read, None, None)
        kept_and_added = torch.eye(read.shape[-1] + 1, dtype=read.dtype, device=read.device)
        return LinearForm(read, kept_and_added[None, None, :, :-1], kept_and_added[None, None, :, -1])

    @classmethod
    def params_extra(cls, shape, **options):
        return 4 * shape.n_layer * shape.d_model


NAIVE = NaiveFullAttnRes
