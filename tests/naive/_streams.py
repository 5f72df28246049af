"""What both naive hyper-connections do with their n streams, whatever their coefficients are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from depthbench.residuals.base import Residual


class Streams(NamedTuple):
    H: Tensor  # (B, T, streams, D)


class NaiveStreams(Residual):
    """The subclass sets ``streams`` and ``connections``, one per sublayer."""

    def open(self, embedding):
        return Streams(torch.stack([embedding] * self.streams, -2))

    def depth_state(self, state, *, block):
        return state.H.flatten(-2)

    def readout(self, state, *, block):
        return state.H.sum(-2)

    def skip(self, state, *, block, rule=None):
        self.skip_rule(rule)
        return state

    def swap_parameters(self, blocks, *, block):
        connections = {"attention": self.connections[2 * block], "feed_forward": self.connections[2 * block + 1]}
        own = {f"{name}_connection.{role}": value for name, one in connections.items() for role, value in one.named_parameters()}
        return super().swap_parameters(blocks, block=block) | own
