"""Mixture-of-Depths Attention, naive: one softmax over concatenated logits. The executable specification, and a proof of the interface.

Pre-LN, and at block b, token t the attention's softmax also runs over the 2b writes of earlier sublayers at the same token:

    sequence logits  q_t . k_s / sqrt(d),  s <= t
    depth logits     q_t . kappa_{j,t} / sqrt(d),  j = attention and feed-forward of blocks 0, ..., b-1

Source: arXiv 2603.15619. Attention writes its keys and values, feed-forward those of an extra projection of its normed input. Depth
keys are stored after the writer's K-norm and before rotation (after it with ``rotate_depth_keys``), and are read as they are by rotated
queries. The last feed-forward writes nothing.
B batch, T time, D width, H query heads, K key/value heads, d head width, J depth slots.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from depthbench.nn.attention import Attention
from depthbench.nn.feed_forward import SwiGLU
from depthbench.nn.layers import Linear
from depthbench.nn.rotary import rotate, rotation_for
from depthbench.nn.sublayer import Sublayer
from depthbench.residuals.base import SingleStream


class DepthCache(NamedTuple):
    x: Tensor  # (B, T, D)
    keys: Tensor  # (J, B, T, K, d)
    values: Tensor  # (J, B, T, K, d)


class DepthAttention(Attention):
    rotate_depth_keys = False

    def forward(self, x_BTD, carry, rotation):
        q, plain_k, v = self.project(x_BTD)
        q, k = rotate(q, rotation), rotate(plain_k, rotation)
        emitted = (k if self.rotate_depth_keys else plain_k, v)
        group, length = q.shape[2] // k.shape[2], q.shape[1]
        k, v, depth_k, depth_v = (heads.repeat_interleave(group, dim=-2) for heads in (k, v, *carry))
        later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        logits_BHTs = torch.einsum("bthd,bshd->bhts", q, k).masked_fill(later, -math.inf)
        depth_logits_BHTJ = torch.einsum("bthd,jbthd->bhtj", q, depth_k)
        shares = (torch.cat((logits_BHTs, depth_logits_BHTJ), -1) / math.sqrt(self.head_dim)).softmax(-1)
        out = torch.einsum("bhts,bshd->bthd", shares[..., :length], v) + torch.einsum("bhtj,jbthd->bthd", shares[..., length:], depth_v)
        return self.o_proj(out.flatten(2)), emitted


class WritingSwiGLU(SwiGLU):
    """Feed-forward that also projects keys and values for the attention of later blocks."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.heads = (config.n_kv_head, config.head_dim)
        self.depth_k_proj = Linear(config.d_model, config.n_kv_head * config.head_dim)
        self.depth_v_proj = Linear(config.d_model, config.n_kv_head * config.head_dim)

    def forward(self, x_BTD, carry, rotation):
        branch_out, _ = super().forward(x_BTD, carry, rotation)
        return branch_out, tuple(projection(x_BTD).unflatten(-1, self.heads) for projection in (self.depth_k_proj, self.depth_v_proj))


class NaiveMoDA(SingleStream):
    skip_rules = ("zeros", "dropped")  # whether a skipped block's two slots still take part in the softmax

    def __init__(self, config, *, rotate_depth_keys: bool = False) -> None:
        super().__init__(config)
        self.rotate_depth_keys = rotate_depth_keys
        self.key_norms = {}  # block -> its attention's K-norm, which its feed-forward's keys use too

    def build_sublayer(self, config, *, sublayer):
        plain = super().build_sublayer(config, sublayer=sublayer)
        if sublayer % 2 == 0:
            core = DepthAttention(config)
            core.rotate_depth_keys = self.rotate_depth_keys
            self.key_norms[sublayer // 2] = core.k_norm
        else:
            core = WritingSwiGLU(config) if sublayer < config.n_sublayer - 1 else SwiGLU(config)
        return Sublayer(plain.norm, core)

    def open(self, embedding):
        none_yet = embedding.new_zeros(0, *embedding.shape[:2], self.config.n_kv_head, self.config.head_dim)
        return DepthCache(embedding, none_yet, none_yet)

    def read(self, state, *, sublayer):
        return state.x, (state.keys, state.values)

    def write(self, state, carry, branch_out, emitted, *, sublayer):
        keys, values = state.keys, state.values
        if emitted is not None:
            key, value = emitted
            norm = self.key_norms[sublayer // 2]
            if sublayer % 2:
                key = key if norm is None else norm(key)
                key = rotate(key, rotation_for(branch_out, self.config.head_dim)) if self.rotate_depth_keys else key
            keys, values = torch.cat((keys, key.unsqueeze(0))), torch.cat((values, value.unsqueeze(0)))
        return DepthCache(state.x + branch_out, keys, values)

    def skip(self, state, *, block, rule=None):
        if self.skip_rule(rule) == "dropped":
            return state
        slots = state.keys.new_zeros(2, *state.keys.shape[1:])
        return state._replace(keys=torch.cat((state.keys, slots)), values=torch.cat((state.values, slots)))

    @classmethod
    def params_extra(cls, shape, **options):
        return (shape.n_layer - 1) * 2 * shape.d_model * shape.n_kv_head * shape.head_dim


NAIVE = NaiveMoDA
