"""The one interface: how a design reads from the depth state, writes to it, and leaves a block out.

All designs share the same 2L sublayers F (attention, feed-forward). Per sublayer k the model does

    branch_in, carry    = read(state, sublayer=k)
    branch_out, emitted = F_k(branch_in, carry, rotation)
    state               = write(state, carry, branch_out, emitted, sublayer=k)

between ``open(embedding)`` and ``close(state, final_norm)``. ``sublayer`` counts from 0 (even: attention, odd: feed-forward)
and so does ``block``; both are keywords everywhere. Where ``block`` names a boundary (``depth_state``, ``readout``, ``begin``)
it runs from 0, before the first block, to L, after the last.

A state is a NamedTuple whose fields are tensors, tuples of tensors, or Python constants. It is a value: no method changes one,
so that a model can start again from any block boundary. It holds only what earlier sublayers produced. What a design makes
ahead of time from later weights is a cache: ``begin`` rebuilds it, since those weights may have been swapped since.

Shapes: B batch, T time, D width, n slots (streams or sources of the state).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from depthbench.errors import unknown
from depthbench.nn.attention import Attention
from depthbench.nn.config import ModelConfig
from depthbench.nn.feed_forward import SwiGLU
from depthbench.nn.layers import RMSNorm
from depthbench.nn.sublayer import Sublayer

State = Any  # the design's own NamedTuple


class About(NamedTuple):
    """What ``depthbench archs`` says of a design, a phrase each."""

    family: str  # "baseline", "normalisation", "hyper-connections", "attention over depth", ...
    update: str  # the residual update as one equation, x the stream, F the sublayer, N its input norm
    weights: str  # what weighs the parts: "fixed", "learned, static", "dynamic" (they depend on the token)
    reads: str  # what a sublayer reads from
    source: str  # the paper, as an arXiv id


class LinearForm(NamedTuple):
    """One sublayer's step as a linear map per token, the state seen as n slots of width D (all the embedding after ``open``):

    branch_in = sum_s read[s] slot_s;    new slot_t = sum_s mix[t, s] slot_s + write[t] branch_out

    ``read`` is (B, T, n), ``mix`` (B, T, m, n), ``write`` (B, T, m); sizes of 1 for B and T broadcast. At the readout, where nothing
    is written, ``mix`` and ``write`` are None.
    """

    read: Tensor
    mix: Tensor | None
    write: Tensor | None


def map_tensors(function: Callable[[Tensor], Tensor], state: State) -> State:
    """The state with ``function`` applied to each of its tensors; constants stay."""
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, tuple):
        fields = [map_tensors(function, field) for field in state]
        return type(state)(*fields) if hasattr(state, "_fields") else tuple(fields)
    return state


class MissingMethod(NotImplementedError):
    """A design lacks a method that is needed; ``design`` is its class."""

    def __init__(self, design: Residual, method: str) -> None:
        self.design = type(design)
        super().__init__(f"{self.design.__name__} lacks the method {method}: every design states it, or inherits it")


class Residual(nn.Module):
    """A residual design. One subclass per file, constructed as ``Design(config, **options)``; its options are the constructor's keywords.

    The module holds only the design's own parameters. It is initialised by ``reset_parameters`` (of itself and of its submodules),
    never in the constructor: models are built on the meta device, and for the same reason constants are Python numbers, not buffers.
    """

    about: ClassVar[About] = About("your own", "not stated", "not stated", "not stated", "")
    skip_rules: ClassVar[tuple[str, ...]] = ("identity",)  # what ``skip`` accepts as ``rule``; the first is the default

    no_state_map: ClassVar[str] = ""  # why a block is no map from depth state to depth state; empty where it is one
    slots: ClassVar[str] = "stream"  # what the slots of ``linear`` are: the one "stream", "streams" that are mixed, or "sources"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config

    # The forward pass ---------------------------------------------------------------------------------------------------------

    def build_sublayer(self, config: ModelConfig, *, sublayer: int) -> Sublayer:
        """F for ``sublayer`` (from 0). Override for an output norm, no input norm, or another core."""
        core = SwiGLU(config) if sublayer % 2 else Attention(config)
        return Sublayer(RMSNorm(config.d_model, config.norm_eps), core)

    def build_final_norm(self, config: ModelConfig) -> nn.Module:
        """The norm before the head."""
        return RMSNorm(config.d_model, config.norm_eps)

    def open(self, embedding: Tensor) -> State:
        """The state before the first block, from the embedding output (B, T, D)."""
        raise MissingMethod(self, "open")

    def begin(self, state: State, *, block: int) -> State:
        """Called whenever a run starts at ``block`` (from 0): rebuilds what the state caches from weights at or after it."""
        return state

    def read(self, state: State, *, sublayer: int) -> tuple[Tensor, Any]:
        """(branch_in, carry) for ``sublayer`` (from 0); ``carry`` is what F or ``write`` needs later, or None."""
        raise MissingMethod(self, "read")

    def write(self, state: State, carry: Any, branch_out: Tensor, emitted: Any, *, sublayer: int) -> State:
        """The state after ``sublayer`` (from 0)."""
        raise MissingMethod(self, "write")

    def close(self, state: State, final_norm: nn.Module, *, block: int) -> Tensor:
        """What the head multiplies, (B, T, D), were the model to end at the boundary ``block`` (L: as it does)."""
        return final_norm(self.readout(state, block=block))

    def compile_regions(self, compile_region: Callable[[Callable], Callable]) -> None:
        """Replaces the design's own fixed-shape functions of tensors by compiled ones. No region may see an index or a list that grows."""

    # What probes and training ask for -----------------------------------------------------------------------------------------

    def depth_state(self, state: State, *, block: int) -> Tensor:
        """z_block (B, T, width), the state at a boundary (0 to L) as the probes see it."""
        raise MissingMethod(self, "depth_state")

    def depth_gradient(self, gradients: State, *, block: int) -> Tensor:
        """The loss gradient on z_block, from a state whose tensors are the gradients on that boundary's state tensors, zeros where
        none arrived.

        Right as it stands where the depth state only rearranges the state's tensors; where it is a weighted mix, designs override it.
        """
        return self.depth_state(gradients, block=block)

    def readout(self, state: State, *, block: int) -> Tensor:
        """The single stream (B, T, D), before the final norm, that an early exit at a boundary (0 to L) would read."""
        raise MissingMethod(self, "readout")

    def skip(self, state: State, *, block: int, rule: str | None = None) -> State:
        """The state after ``block`` (from 0) had it been left out, from the state before it, by one of ``skip_rules``."""
        raise MissingMethod(self, "skip")

    def skip_rule(self, rule: str | None) -> str:
        """The rule's name, the default for None. Raises UserError for a name that is none of ``skip_rules``."""
        if rule is not None and rule not in self.skip_rules:
            raise unknown("skip rule", rule, self.skip_rules)
        return rule or self.skip_rules[0]

    def stream(self, state: State) -> Tensor:
        """What of the state a block is a map of, (B, T, D) or, where a token has several such vectors, (B, T, n, D): flattened over n it
        is the depth state, unless ``no_state_map`` says otherwise."""
        raise MissingMethod(self, "stream")

    def with_stream(self, state: State, stream: Tensor) -> State:
        """The state with that replaced and all else held."""
        raise MissingMethod(self, "with_stream")

    def swap_parameters(self, blocks: nn.ModuleList, *, block: int) -> dict[str, Tensor]:
        """What moves when ``block`` (from 0) changes places with another, by role. Default: all parameters inside the block."""
        return dict(blocks[block].named_parameters())

    @torch.no_grad()
    def swap(self, blocks: nn.ModuleList, *, first: int, second: int) -> None:
        """Exchanges two blocks (from 0) in place, role by role where both have one of the same shape. Its own inverse, bit for bit, and
        whole or not at all: what an interruption left half done is undone."""
        mine, theirs = (self.swap_parameters(blocks, block=block) for block in (first, second))
        roles = [role for role in mine.keys() & theirs.keys() if mine[role].shape == theirs[role].shape]
        kept = [(mine[role], theirs[role], mine[role].clone(), theirs[role].clone()) for role in roles]
        try:
            for left, right, of_left, of_right in kept:
                left.copy_(of_right)
                right.copy_(of_left)
        except BaseException:
            for left, right, of_left, of_right in kept:
                left.copy_(of_left)
                right.copy_(of_right)
            raise

    def linear(self, state: State, *, sublayer: int, branch_out: Tensor | None = None) -> LinearForm | None:
        """The coefficients with which ``sublayer`` (from 0; 2L is the readout) acts on ``state``, the state before it; None where the
        step is not linear.

        ``branch_out`` is what the sublayer added, for designs whose coefficients depend on it (a norm after the addition).
        """
        return None

    def linear_note(self) -> str:
        """What of the step the linear form does not hold at the present weights, in a few words; empty where it is exact."""
        return ""

    def no_decay_parameters(self) -> Iterable[nn.Parameter]:
        """Parameters that weight decay must leave alone in every recipe, whatever their number of dimensions."""
        return ()

    def tables_of_vectors(self) -> Iterable[nn.Parameter]:
        """Parameters of two or more dimensions that hold vectors side by side, no matrix: they decay only where norms do."""
        return ()

    @classmethod
    def params_extra(cls, shape: Any, **options: Any) -> int:
        """Parameters beyond Pre-LN's, by formula; ``shape`` is a Shape or a ModelConfig, ``options`` the constructor's."""
        return 0

    @classmethod
    def flops_extra(cls, shape: Any, seq_len: int, **options: Any) -> int:
        """FLOPs of one sequence's forward pass through the blocks beyond Pre-LN's, by formula: two per multiply-add of what mixes, reads
        and writes the state. Norms, softmax and other element by element work is left out, as in ``depthbench.shapes``."""
        return 0


class Stream(NamedTuple):
    """The state of a design with one residual stream."""

    x: Tensor  # (B, T, D)


class SingleStream(Residual):
    """A design whose state is one stream that every sublayer reads whole. The subclass says how it is written."""

    def open(self, embedding: Tensor) -> State:
        return Stream(embedding)

    def read(self, state: State, *, sublayer: int) -> tuple[Tensor, Any]:
        return state.x, None

    def depth_state(self, state: State, *, block: int) -> Tensor:
        return state.x

    def readout(self, state: State, *, block: int) -> Tensor:
        return state.x

    def stream(self, state: State) -> Tensor:
        return state.x

    def with_stream(self, state: State, stream: Tensor) -> State:
        return state._replace(x=stream)

    def skip(self, state: State, *, block: int, rule: str | None = None) -> State:
        self.skip_rule(rule)
        return state

    def linear(self, state: State, *, sublayer: int, branch_out: Tensor | None = None) -> LinearForm | None:
        """One slot, carried over and added to with weight 1."""
        one = state.x.new_ones(1, 1, 1)
        return LinearForm(one, None, None) if sublayer == self.config.n_sublayer else LinearForm(one, one.unsqueeze(-1), one)
