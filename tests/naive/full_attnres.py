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


class Mix(nn.Module):
    """One mix over sources: its query, zero at the start, and the weight of its key norm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.query = nn.Parameter(torch.empty(width))
        self.weight = nn.Parameter(torch.empty(width))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)
        nn.init.ones_(self.weight)

    def logits(self, sources: Tensor) -> Tensor:
        """(..., D) -> (...)."""
        scale = (sources.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (sources * scale * self.weight * self.query).sum(-1)


class NaiveFullAttnRes(Residual):
    skip_rules = ("reference", "renormalise")

    def __init__(self, config) -> None:
        super().__init__(config)
        self.mixes = nn.ModuleDict({str(k): Mix(config.d_model, config.norm_eps) for k in range(1, config.n_sublayer + 1)})

    def weights(self, state: Sources, sublayer: int) -> Tensor:
        """Share of each source in what ``sublayer`` reads, (n, B, T)."""
        if state.newest_only or sublayer == 0:
            shares = torch.zeros_like(state.sources[..., 0])
            return torch.cat((shares[:-1], torch.ones_like(shares[-1:])))
        return self.mixes[str(sublayer)].logits(state.sources).softmax(0)

    def mixed(self, state: Sources, sublayer: int) -> Tensor:
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
        moving = {"inner_mix": self.mixes[str(2 * block + 1)], "right_mix": self.mixes[str(2 * block + 2)]}
        own = {f"{role}.{name}": value for role, mix in moving.items() for name, value in mix.named_parameters()}
        return super().swap_parameters(blocks, block=block) | own

    def linear(self, state, *, sublayer, branch_out=None):
        read = self.weights(state, sublayer).movedim(0, -1)
        if sublayer == self.config.n_sublayer:
            return LinearForm(read, None, None)
        kept_and_added = torch.eye(read.shape[-1] + 1, dtype=read.dtype, device=read.device)
        return LinearForm(read, kept_and_added[None, None, :, :-1], kept_and_added[None, None, :, -1])

    @classmethod
    def params_extra(cls, shape):
        return 4 * shape.n_layer * shape.d_model


class CachedSources(NamedTuple):
    sources: Tensor  # (n, B, T, D)
    logits: Tensor  # (2L, n, B, T): of each source in every mix; a cache, made from later weights
    newest_only: bool = False


class CachedFullAttnRes(NaiveFullAttnRes):
    """The same function, with the logits of a source in all later mixes made once, when the source is."""

    def all_logits(self, sources):
        return torch.stack([mix.logits(sources) for mix in self.mixes.values()])

    def weights(self, state, sublayer):
        if state.newest_only or sublayer == 0:
            return super().weights(state, sublayer)
        return state.logits[sublayer - 1].softmax(0)

    def open(self, embedding):
        return CachedSources(embedding.unsqueeze(0), self.all_logits(embedding.unsqueeze(0)))

    def begin(self, state, *, block):
        return state._replace(logits=self.all_logits(state.sources))

    def write(self, state, carry, branch_out, emitted, *, sublayer):
        newest = branch_out.unsqueeze(0)
        return CachedSources(torch.cat((state.sources, newest)), torch.cat((state.logits, self.all_logits(newest)), 1))


NAIVE = NaiveFullAttnRes
