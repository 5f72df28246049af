"""Block Attention Residuals: softmax mixes over the sums of groups of sublayers.

    h_k = sum_i a_{k,i} b_i,    a_{k,i} = softmax_i( w_k . (gamma_k * rms(b_i)) )        values are not normalised, no 1/sqrt(D)
    b_0 = embedding,    b_g = sum of F_k(N_k(h_k)) over the S sublayers k = (g-1) S, ..., g S - 1 of group g

Sublayer k reads the closed groups, and the running sum of its own where it is not the first of it; the readout h_2L reads all, a short
last group included, and goes to the final norm. h_0 = embedding: one source, hence no parameters.

Source: arXiv 2603.15031, section 3. Shapes: b_i, h_k (B, T, D); w_k, gamma_k (D), a pair per mix k = 1, ..., 2L; S in sublayers, any
number from 1 (then it is Full) to 2L and beyond (then embedding and running sum are the only sources). Slots: the closed sums in
their order, then the running sum.

Zero queries give the mean of the sources, which is the Pre-LN stream over their number: every norm divides that out, up to its eps.

Deviations
- Paper, Moonshot's and FLA's code: S counts sublayers, as here; Kimi-K3's counts transformer blocks.
- Paper's count and FLA own a query and key norm for the first sublayer, where they never get a gradient. Here they do not exist.
- Reference benchmark: eps 1e-5 in the key norms and the norms that follow a mix, where all else has 1e-6. Here the same everywhere;
  ``mix_eps`` sets those. The group size of its published figures is not known; the default makes the paper's eight groups.
- Not stated: weight decay. Queries and key norms do not decay, nor do other norms; in the reference benchmark all of them do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthbench.errors import UserError
from depthbench.nn.config import ModelConfig
from depthbench.nn.layers import RMSNorm
from depthbench.nn.sublayer import Sublayer
from depthbench.residuals._depth_mix import Begin, DepthMix, Register, Rows, Store, Tape, rstd, without_autocast
from depthbench.residuals.base import About, LinearForm, Residual


class Cache:
    """Where the closed sources of one state lie, and the tape of the run that made it. Both go on with later states, hence ``position``;
    a state whose sources were exchanged finds that they are not these."""

    def __init__(self, rows: Rows, closed: tuple[Tensor, ...], tape: Tape | None, tick: Tensor | None, position: int) -> None:
        self.rows, self.closed, self.tape, self.tick, self.position = rows, closed, tape, tick, position


class Sources(NamedTuple):
    closed: tuple[Tensor, ...]  # (B, T, D) each: the embedding and the sums of the closed groups
    running: Tensor | None  # (B, T, D): the sum of the open group, None where nothing was added to it yet
    newest_only: bool  # after a skip by the reference rule: the next mix is the newest source itself
    cache: Cache

    @property
    def newest(self) -> Tensor:
        return self.closed[-1] if self.running is None else self.running

    @property
    def slots(self) -> tuple[Tensor, ...]:
        return self.closed if self.running is None else (*self.closed, self.running)


class BlockAttnRes(Residual):
    """Softmax over group sums.

    group_size: sublayers per group; by default 2 ceil(L/8), which makes at most eight groups that begin before attention.
    mix_eps: eps of the key norms and of the norms that follow a mix, instead of the model's norm_eps.
    """

    about = About("attention residuals", "sum_i a_i b_i; b_g + F(N(h))", "dynamic", "sums of groups so far", "2603.15031")
    skip_rules = ("reference", "renormalise")
    no_state_map = "a block reads each of its sources with weights of its own: it is no map from one depth state to the next"
    slots = "sources"

    def __init__(self, config: ModelConfig, *, group_size: int | None = None, mix_eps: float | None = None) -> None:
        super().__init__(config)
        if group_size is not None and group_size < 1:
            raise UserError(f"group_size is {group_size}: give a whole number of at least 1, or null for eight groups")
        if mix_eps is not None and not 0 < mix_eps < 1:
            raise UserError(f"mix_eps is {mix_eps}: give a number between 0 and 1, such as 1e-5, or null for the model's norm_eps")
        self.group_size = self.group_size_of(config, group_size)
        self.mix_eps = config.norm_eps if mix_eps is None else mix_eps
        self.queries = nn.Parameter(torch.empty(config.n_sublayer, config.d_model))  # row k - 1 belongs to mix k
        self.key_norms = nn.Parameter(torch.empty(config.n_sublayer, config.d_model))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.queries)
        nn.init.ones_(self.key_norms)

    def build_sublayer(self, config: ModelConfig, *, sublayer: int) -> Sublayer:
        plain = super().build_sublayer(config, sublayer=sublayer)
        return Sublayer(RMSNorm(config.d_model, self.mix_eps), plain.core) if sublayer else plain

    def build_final_norm(self, config: ModelConfig) -> RMSNorm:
        return RMSNorm(config.d_model, self.mix_eps)

    # The forward pass ---------------------------------------------------------------------------------------------------------

    def open(self, embedding: Tensor) -> Sources:
        rows = self._rows(embedding.shape)
        closed = (Store.apply(rows, embedding, None),)
        return Sources(closed, None, False, Cache(rows, closed, None, None, 0))

    def begin(self, state: Sources, *, block: int) -> Sources:
        return self._at(state, 2 * block)

    def read(self, state: Sources, *, sublayer: int) -> tuple[Tensor, None]:
        return self.mix(state, sublayer=sublayer), None

    def write(self, state: Sources, carry: Any, branch_out: Tensor, emitted: Any, *, sublayer: int) -> Sources:
        if not self._current(state, sublayer):
            state = self._at(state, sublayer)
        closed, running, cache = state.closed, state.running, state.cache
        tape, tick = cache.tape, cache.tick
        tape.position += 1
        if self._boundary(sublayer + 1):
            closed, running = (*closed, Store.apply(cache.rows, branch_out, running)), None
            tick = Register.apply(tape, tick, closed[-1])
        else:
            running = branch_out.to(self.queries.dtype) if running is None else running + branch_out
        return Sources(closed, running, False, Cache(cache.rows, closed, tape, tick, tape.position))

    # The mix ------------------------------------------------------------------------------------------------------------------

    def mix(self, state: Sources, *, sublayer: int) -> Tensor:
        """h (B, T, D) as ``sublayer`` (from 0; 2L is the readout) reads it from the state before it."""
        if state.newest_only or len(state.slots) == 1:
            return state.newest
        if self._current(state, sublayer):
            return DepthMix.apply(state.cache.tape, sublayer, state.cache.tick, state.running)
        with without_autocast(state.newest):  # as the equation says: a state that is not where its run stands is read rarely
            return torch.einsum("btn,nbtd->btd", self.weights(state, sublayer=sublayer), torch.stack(state.slots))

    def weights(self, state: Sources, *, sublayer: int) -> Tensor:
        """The share of each slot in that mix, (B, T, n)."""
        slots = state.slots
        if state.newest_only or len(slots) == 1:
            one = self.queries.new_zeros(*state.newest.shape[:2], len(slots))
            one[..., -1] = 1
            return one
        with without_autocast(state.newest):
            query = self.queries[sublayer - 1] * self.key_norms[sublayer - 1]
            return torch.stack([(slot @ query) * rstd(slot, self.mix_eps) for slot in slots], -1).softmax(-1)

    def _boundary(self, sublayer: int) -> bool:
        """Whether a group ends before ``sublayer``."""
        return sublayer % self.group_size == 0

    def _rows(self, shape: torch.Size) -> Rows:
        return Rows(self.queries.detach(), shape, self.config.n_sublayer // self.group_size + 1, self.mix_eps)

    def _at(self, state: Sources, position: int) -> Sources:
        """The state with a tape for a run that goes on at mix ``position``; sources that lie elsewhere, or are not the last, are copied."""
        closed, rows = state.closed, state.cache.rows
        if closed is not state.cache.closed or len(closed) != rows.count:
            rows = self._rows(state.newest.shape)
            closed = tuple(Store.apply(rows, source, None) for source in closed)
        tape = Tape(rows, self.group_size, self.config.n_sublayer, position)
        tick = Register.apply(tape, Begin.apply(tape, self.queries, self.key_norms), *closed)
        return state._replace(closed=closed, cache=Cache(rows, closed, tape, tick, position))

    def _current(self, state: Sources, position: int) -> bool:
        """Whether the state is the newest of its run, and ``position`` where the run stands."""
        cache = state.cache
        untouched = cache.tape is not None and cache.closed is state.closed and cache.rows.count == len(state.closed)
        return untouched and cache.position == cache.tape.position == position

    # What probes and training ask for -----------------------------------------------------------------------------------------

    def depth_state(self, state: Sources, *, block: int) -> Tensor:
        """The mix that the block's attention reads where a group begins there, and the readout's at the end; else the running sum."""
        if self._boundary(2 * block) or block == self.config.n_layer:
            return self.mix(state, sublayer=2 * block)
        return torch.zeros_like(state.newest) if state.running is None else state.running

    def depth_gradient(self, gradients: Sources, *, block: int) -> Tensor:
        """The gradient on the newest source, which reaches the loss through every later mix."""
        return gradients.newest

    def readout(self, state: Sources, *, block: int) -> Tensor:
        return self.mix(state, sublayer=2 * block)

    def stream(self, state: Sources) -> Tensor:
        """The newest source, or the running sum."""
        return state.newest

    def with_stream(self, state: Sources, stream: Tensor) -> Sources:
        if state.running is None:
            return state._replace(closed=(*state.closed[:-1], stream))
        return state._replace(running=stream)

    def skip(self, state: Sources, *, block: int, rule: str | None = None) -> Sources:
        """``reference``: a boundary mix that reads next becomes its newest source; where none does, no group is opened: what came before
        goes on as the running sum. ``renormalise``: the groups open and close as ever, without what the block would have added."""
        closed, running = state.closed, state.running
        after = 2 * block + 2
        at_boundary = self._boundary(after) or after == self.config.n_sublayer
        reference = self.skip_rule(rule) == "reference"
        if reference and not at_boundary:
            return state if running is not None else state._replace(closed=closed[:-1], running=closed[-1])
        if running is not None and (self._boundary(after) or (self._boundary(after - 1) and not reference)):
            closed, running = (*closed, running), None
        return state._replace(closed=closed, running=running, newest_only=reference)

    def swap_parameters(self, blocks: nn.ModuleList, *, block: int) -> dict[str, Tensor]:
        moving = {"inner_mix": 2 * block, "right_mix": 2 * block + 1}
        tables = {"query": self.queries, "key_norm": self.key_norms}
        own = {f"{role}.{name}": table[row] for role, row in moving.items() for name, table in tables.items()}
        return super().swap_parameters(blocks, block=block) | own

    def linear(self, state: Sources, *, sublayer: int, branch_out: Tensor | None = None) -> LinearForm:
        read = self.weights(state, sublayer=sublayer)
        if sublayer == self.config.n_sublayer:
            return LinearForm(read, None, None)
        n = read.shape[-1]
        slots = torch.eye(n + (state.running is None), dtype=read.dtype, device=read.device)
        return LinearForm(read, slots[None, None, :, :n], slots[None, None, :, -1])

    def tables_of_vectors(self) -> Iterable[nn.Parameter]:
        return self.queries, self.key_norms

    @staticmethod
    def group_size_of(shape: Any, group_size: int | None) -> int:
        return 2 * -(-shape.n_layer // 8) if group_size is None else group_size

    @classmethod
    def params_extra(cls, shape: Any, **options: Any) -> int:
        return 4 * shape.n_layer * shape.d_model

    @classmethod
    def flops_extra(cls, shape: Any, seq_len: int, *, group_size: int | None = None, **options: Any) -> int:
        """A logit and a term of the mix for every source of every mix, D multiply-adds each."""
        size = cls.group_size_of(shape, group_size)
        read = sum(k // size + 1 + (k % size > 0) for k in range(1, 2 * shape.n_layer + 1))
        return 4 * read * shape.d_model * seq_len
