"""Block Attention Residuals, naive: the mixes of Full over a stack of group sums, the running one last.

    b_0 = embedding,    b_g = sum of the outputs of group g's S sublayers
    h_k = mix of the closed b, and of the running sum of k's own group where k is not its first

Source: arXiv 2603.15031, section 3. Shapes: as in ``full_attnres``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from depthbench.residuals.base import LinearForm
from tests.naive.full_attnres import NaiveFullAttnRes


class Groups(NamedTuple):
    sources: Tensor  # (n, B, T, D)
    running: bool = False  # whether the last source is the sum of an open group
    newest_only: bool = False  # after a skip by the reference rule: the next mix is the newest source itself


class NaiveBlockAttnRes(NaiveFullAttnRes):
    def __init__(self, config, *, group_size: int | None = None) -> None:
        super().__init__(config)
        self.group_size = 2 * -(-config.n_layer // 8) if group_size is None else group_size

    def open(self, embedding):
        return Groups(embedding.unsqueeze(0))

    def write(self, state, carry, branch_out, emitted, *, sublayer):
        closed, summed = (state.sources[:-1], state.sources[-1] + branch_out) if state.running else (state.sources, branch_out)
        return Groups(torch.cat((closed, summed.unsqueeze(0))), running=(sublayer + 1) % self.group_size != 0)

    def depth_state(self, state, *, block):
        if 2 * block % self.group_size == 0 or block == self.config.n_layer:
            return self.mixed(state, 2 * block)
        return state.sources[-1] if state.running else torch.zeros_like(state.sources[-1])

    def skip(self, state, *, block, rule=None):
        begins = {after: (2 * block + after) % self.group_size == 0 for after in (1, 2)}  # a group, so many sublayers later
        if self.skip_rule(rule) == "renormalise":
            return state._replace(running=state.running and not any(begins.values()))
        if begins[2] or block == self.config.n_layer - 1:
            return state._replace(running=state.running and not begins[2], newest_only=True)
        return state._replace(running=True)

    def linear(self, state, *, sublayer, branch_out=None):
        form = super().linear(state, sublayer=sublayer)
        if sublayer == self.config.n_sublayer or not state.running:
            return form
        slots = torch.eye(form.read.shape[-1], dtype=form.read.dtype, device=form.read.device)
        return LinearForm(form.read, slots[None, None], slots[None, None, :, -1])


NAIVE = NaiveBlockAttnRes
