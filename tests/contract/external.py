"""A design as a user writes one: a file of its own, outside the package, with an option, parameters, and a region to compile."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from depthbench.residuals.base import About, LinearForm, Residual


class Pair(NamedTuple):
    near: Tensor  # (B, T, D)
    far: Tensor  # (B, T, D)


class TwoLanes(Residual):
    """Two streams: attention reads and writes ``near`` and leaks into ``far``, feed-forward the other way round.

    leak: how much of a branch's output reaches the other stream at initialisation
    """

    about = About("your own", "own + g f, other + h f", "learned, static", "one of two streams", "")

    def __init__(self, config, *, leak: float = 0.1) -> None:
        super().__init__(config)
        self.leak = leak
        self.gates = nn.Parameter(torch.empty(config.n_sublayer, 2, config.d_model))
        self.add = add

    def reset_parameters(self):
        with torch.no_grad():
            self.gates[:, 0], self.gates[:, 1] = 1.0, self.leak

    def no_decay_parameters(self):
        return [self.gates]

    def open(self, embedding):
        return Pair(embedding, embedding)

    def read(self, state, *, sublayer):
        return state[sublayer % 2], None

    def write(self, state, carry, branch_out, emitted, *, sublayer):
        added = self.add(state[sublayer % 2], state[1 - sublayer % 2], branch_out, self.gates[sublayer])
        return Pair(*added) if sublayer % 2 == 0 else Pair(*added[::-1])

    def compile_regions(self, compile_region):
        self.add = compile_region(add)

    def depth_state(self, state, *, block):
        return torch.cat(state, -1)

    def readout(self, state, *, block):
        return state.near + state.far

    def skip(self, state, *, block, rule=None):
        self.skip_rule(rule)
        return state

    def swap_parameters(self, blocks, *, block):
        gates = {f"gates.{k}": self.gates[2 * block + k] for k in range(2)}
        return super().swap_parameters(blocks, block=block) | gates

    def linear(self, state, *, sublayer, branch_out=None) -> LinearForm | None:
        return None  # a gate per channel has no scalar weight

    @classmethod
    def params_extra(cls, shape, **options):
        return 4 * shape.n_layer * shape.d_model


def add(own, other, branch_out, gates):
    return own + gates[0] * branch_out, other + gates[1] * branch_out
