"""Mixture-of-Depths Attention: attention that also reads what earlier sublayers wrote at the same token.

Pre-LN, and in block b one softmax runs over the sequence and over the 2b writes of the blocks before:

    x_{k+1} = x_k + F_k(N_k(x_k)),    hidden = N(x_2L)
    sequence logits  q_t . k_s / sqrt(d),  s <= t             values v_s
    depth logits     q_t . kappa_{j,t} / sqrt(d),  j < 2b     values nu_{j,t}

Attention writes the keys (before rotation) and values that it reads itself, the feed-forward two more projections of its normed input;
block c makes the writes 2c and 2c + 1. Block 0 is plain attention. The last block writes nothing, since nobody would read it.

Source: arXiv 2603.15619, section 3.
Shapes: x_k (B, T, D), k the sublayer from 0; a write (B, T, K, d) for keys and for values, K key/value heads of width d.

Deviations
- Paper: with norms after the sublayers the gain is larger; both are tested. Reference benchmark and here: Pre-LN.
- Paper: nothing on rotation and K-norm of depth keys. The authors' code stores keys before norm and rotation and applies the reader's
  K-norm. Reference benchmark and here: the writer's K-norm (of its block's attention, for feed-forward writes too), and none rotated. As
  queries are rotated, a depth logit then depends on the absolute position; with ``rotate_depth_keys`` keys are rotated to their own, and it
  does not.
- The authors' code has biases and also projects a write of the last feed-forward. Paper's count, reference benchmark and here: neither.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from depthbench.nn.attention import Attention
from depthbench.nn.config import ModelConfig
from depthbench.nn.feed_forward import SwiGLU
from depthbench.nn.layers import Linear
from depthbench.nn.rotary import rotate, rotation_for
from depthbench.nn.sublayer import Sublayer, to_compute_dtype
from depthbench.residuals._depth_attention import Memory
from depthbench.residuals.base import About, SingleStream


class Depth(NamedTuple):
    """The stream, and what was written so far: a tensor (B, T, K, d) of keys and one of values per write."""

    x: Tensor  # (B, T, D)
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    memory: Memory  # the same writes, as attention reads them

    @classmethod
    def of(cls, x: Tensor, memory: Memory) -> Depth:
        return cls(x, memory.keys, memory.values, memory)

    def known_to(self, *memories: Memory) -> Memory:
        """The first of the memories, or else of its own, that was made from these very writes; a new one where somebody changed them."""
        for memory in (*memories, self.memory):
            if memory.keys is self.keys and memory.values is self.values:
                return memory
        return Memory(self.keys, self.values, self.memory.capacity)


class DepthSublayer(Sublayer):
    """Attention; ``carry`` is the memory that it reads. Emits the keys and values of its own write, and the memory once read.

    What is read grows with depth, so reading stays outside the compiled region.
    """

    regions = ("project",)

    def __init__(self, norm: nn.Module, core: Attention, rotate_depth_keys: bool) -> None:
        super().__init__(norm, core)
        self.rotate_depth_keys = rotate_depth_keys

    def project(self, branch_in: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v = self.core.project(to_compute_dtype(self.norm(branch_in)))
        rotated_k = rotate(k, rotation)
        return rotate(q, rotation), rotated_k, v, rotated_k if self.rotate_depth_keys else k

    def forward(self, branch_in: Tensor, carry: Memory, rotation: Tensor) -> tuple[Tensor, Any]:
        q, k, v, written_k = self.project(branch_in, rotation)
        out_BTHd, memory = carry.attend(q, k, v)
        return self.core.o_proj(out_BTHd.flatten(2)), (written_k, v, memory)


class WritingSwiGLU(SwiGLU):
    """The feed-forward; emits the keys and values of its write, projected from its normed input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.heads = (config.n_kv_head, config.head_dim)
        self.depth_k_proj = Linear(config.d_model, config.n_kv_head * config.head_dim)
        self.depth_v_proj = Linear(config.d_model, config.n_kv_head * config.head_dim)

    def forward(self, x_BTD: Tensor, carry: Any, rotation: Tensor) -> tuple[Tensor, Any]:
        branch_out, _ = super().forward(x_BTD, carry, rotation)
        return branch_out, tuple(projection(x_BTD).unflatten(-1, self.heads) for projection in (self.depth_k_proj, self.depth_v_proj))


class MoDA(SingleStream):
    """x + F(N(x)), with an attention that also reads what earlier sublayers wrote at its token.

    rotate_depth_keys: rotate depth keys to their own position, so that depth logits do not depend on it
    """

    about = About("depth attention", "x + F(N(x), writes)", "dynamic in attention", "the stream, earlier K and V", "2603.15619")
    skip_rules = ("zeros", "dropped")  # the two writes of a skipped block are zeros that take part in the softmax, or are not there

    def __init__(self, config: ModelConfig, *, rotate_depth_keys: bool = False) -> None:
        super().__init__(config)
        self.rotate_depth_keys = rotate_depth_keys
        self.key_norms: dict[int, nn.Module | None] = {}  # the attention's K-norm by block: its feed-forward's keys go through it too

    def build_sublayer(self, config: ModelConfig, *, sublayer: int) -> Sublayer:
        plain = super().build_sublayer(config, sublayer=sublayer)
        if sublayer % 2:
            return Sublayer(plain.norm, WritingSwiGLU(config)) if self._writes(sublayer // 2) else plain
        self.key_norms[sublayer // 2] = plain.core.k_norm
        return DepthSublayer(plain.norm, plain.core, self.rotate_depth_keys)

    def _writes(self, block: int) -> bool:
        return block < self.config.n_layer - 1

    def open(self, embedding: Tensor) -> Depth:
        return Depth.of(embedding, Memory((), (), capacity=2 * (self.config.n_layer - 1)))

    def read(self, state: Depth, *, sublayer: int) -> tuple[Tensor, Any]:
        return state.x, None if sublayer % 2 else state.known_to()

    def write(self, state: Depth, carry: Any, branch_out: Tensor, emitted: Any, *, sublayer: int) -> Depth:
        block, is_feed_forward = divmod(sublayer, 2)
        x = state.x + branch_out
        if not self._writes(block):
            return state._replace(x=x)
        key, value, *read = emitted
        if is_feed_forward:
            norm = self.key_norms[block]
            key = key if norm is None else norm(key)
            key = rotate(key, rotation_for(x, self.config.head_dim)) if self.rotate_depth_keys else key
        return Depth.of(x, state.known_to(*read).write(key, value))

    def skip(self, state: Depth, *, block: int, rule: str | None = None) -> Depth:
        if self.skip_rule(rule) == "dropped" or not self._writes(block):
            return state
        x = to_compute_dtype(state.x)
        zeros = x.new_zeros(*x.shape[:2], self.config.n_kv_head, self.config.head_dim)
        return Depth.of(state.x, state.known_to().write(zeros, zeros).write(zeros, zeros))

    @classmethod
    def params_extra(cls, shape: Any, **options: Any) -> int:
        return (shape.n_layer - 1) * 2 * shape.d_model * shape.n_kv_head * shape.head_dim

    @classmethod
    def flops_extra(cls, shape: Any, seq_len: int, **options: Any) -> int:
        """Per token 8 b H d in block b's attention, logits and values of 2b writes; and 4 D K d per feed-forward that writes."""
        reads = 8 * (shape.n_layer * (shape.n_layer - 1) // 2) * shape.n_head * shape.head_dim
        return seq_len * (reads + 2 * cls.params_extra(shape))
