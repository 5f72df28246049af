"""Attention over a sequence and, in the same softmax, over what was written earlier at the same token; and the memory of those writes.

    l_ts = q_t . k_s / sqrt(d),  s <= t        c_tj = q_t . kappa_tj / sqrt(d),  j = 1, ..., J        lse the log-sum-exp of both
    out_t = sum_s e^(l_ts - lse) v_s + sum_j e^(c_tj - lse) nu_tj

The sequence part is fused attention, merged with the depth part by its own log-sum-exp. Backward, with P_j = e^(c_j - lse), g the
gradient on out and D_j = P_j (g . nu_j - g . out) / sqrt(d):

    grad nu_j = P_j g        grad kappa_j = D_j q        grad q = that of the sequence part + sum_j D_j kappa_j

Every block reads all earlier writes. Were a reading to hand each write its gradient, there would be a tensor for every pair of a reading
and a write. Instead a reading leaves (q, g, P, D) on a tape. The first reading after a write has its turn last in backward, and computes
the write's gradient from the tape over all readings at once, as one matrix product per token and head. For the same reason the writes lie
side by side in one buffer.

Shapes: B batch, T time, H query heads, K key/value heads, G = H/K, d head width, J writes, N = B T K.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from depthbench.residuals import _fused_attention

PAGE = 8  # readings that the tape keeps in one piece: enough rows to be worth a matrix product


@dataclass(frozen=True, eq=False)
class Memory:
    """The writes that a state holds, a tensor (B, T, K, d) each, and what makes reading them cheap. A value, as the state is.

    The memories of a run share a buffer. One that is no longer the newest there, since others wrote behind it or read it in a graph, goes
    on in a copy.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    capacity: int  # writes that the buffer is made for; more cost a copy
    buffer: Buffer | None = None
    version: int = 0  # the buffer's, as long as this is its newest memory
    read: int = 0  # writes whose gradient is an earlier reading's to compute
    tick: Tensor | None = None  # ties that reading to the next one, for which it has to wait in backward

    def write(self, key: Tensor, value: Tensor) -> Memory:
        """The memory with one more write (B, T, K, d)."""
        memory = self._at_home(key, room=1)
        key, value = Store.apply(memory.buffer, len(self.keys), key, value)
        return memory._next(keys=(*self.keys, key), values=(*self.values, value))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Memory]:
        """Causal attention of q (B, T, H, d) over k, v (B, T, K, d) and all writes: out (B, T, H, d), and the memory to go on with."""
        if not self.keys:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2), self
        memory = self._at_home(self.keys[0])
        unread = (*self.keys[memory.read :], *self.values[memory.read :])
        out, tick = DepthAttention.apply(memory.buffer, len(self.keys), q, k, v, memory.tick, *unread)
        return out, memory._next(read=len(self.keys), tick=tick) if tick.requires_grad else memory

    def _at_home(self, like: Tensor, room: int = 0) -> Memory:
        """This memory in a buffer that is its own to write to and to read from, with room for writes of the kind of ``like``."""
        buffer, length = self.buffer, len(self.keys) + room
        if buffer is not None and buffer.version == self.version and buffer.holds(like, length):
            return self
        buffer = Buffer.of(self.keys, self.values, like, max(self.capacity, length))
        return Memory(self.keys, self.values, self.capacity, buffer)

    def _next(self, **changes) -> Memory:
        self.buffer.version += 1
        return replace(self, version=self.buffer.version, **changes)


@dataclass(eq=False)
class Buffer:
    """The keys and values of all writes, (B, T, K, capacity, d): those that one query reads are neighbours."""

    keys: Tensor
    values: Tensor
    version: int = 0
    tape: Tape = field(default_factory=lambda: Tape())

    @classmethod
    def of(cls, keys: tuple[Tensor, ...], values: tuple[Tensor, ...], like: Tensor, capacity: int) -> Buffer:
        dtype = reduce(torch.promote_types, (write.dtype for write in (*keys, *values)), like.dtype)
        with torch.inference_mode(False):  # else a buffer made during validation could not be written to in training
            shape = (*like.shape[:3], capacity, like.shape[3])
            buffer = cls(*(torch.empty(shape, dtype=dtype, device=like.device) for _ in range(2)))
        for slot, write in enumerate(zip(keys, values, strict=True)):
            buffer.put(slot, *write)
        return buffer

    def holds(self, write: Tensor, length: int) -> bool:
        return length <= self.keys.shape[3] and torch.promote_types(self.keys.dtype, write.dtype) == self.keys.dtype

    @torch.no_grad()
    def put(self, slot: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Copies a write into its slot and gives it back as it lies there. No slot is written twice, so that what autograd would check
        (has a tensor changed since it was saved?) holds, though all slots share a version: hence ``data``."""
        return tuple(whole.data[..., slot, :].copy_(part) for whole, part in ((self.keys, key), (self.values, value)))

    def front(self, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The first ``length`` keys and values, (N, length, d)."""
        return tuple(whole.flatten(0, 2)[:, :length].to(dtype) for whole in (self.keys, self.values))


class Store(torch.autograd.Function):
    """A write's key and value (B, T, K, d), moved into a slot of the buffer."""

    @staticmethod
    def forward(ctx, buffer: Buffer, slot: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return buffer.put(slot, key, value)

    @staticmethod
    def backward(ctx, grad_key, grad_value):
        return None, None, grad_key, grad_value


class DepthAttention(torch.autograd.Function):
    """(out, tick) of q over k, v and the first ``length`` writes of the buffer.

    ``unread`` are the keys and then the values of the last of these writes, those that no earlier reading takes care of: this one gives
    their gradients, for itself and for all later readings. ``tick``, the earlier reading's, has no value and no gradient. It makes an edge
    in the graph, so that readings have their turn in reverse even where the output of one is never used.
    """

    @staticmethod
    def forward(ctx, buffer: Buffer, length: int, q: Tensor, k: Tensor, v: Tensor, tick: Tensor | None, *unread: Tensor):
        kernel = _fused_attention.kernel_for(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            out, lse, extra = kernel.forward(q, k, v)
            keys, values = buffer.front(length, q.dtype)
            logits = _product(_per_head(q, k), keys.mT, scale=1 / math.sqrt(q.shape[-1]))
            shares = torch.cat((lse.reshape(*logits.shape[:2], 1), logits), -1).log_softmax(-1)
            lse = lse - shares[..., 0].view_as(lse)  # of both parts: a share's logarithm is what it stands for less the whole
            shares = shares.exp_()
            of_sequence, shares = shares[..., 0].view_as(lse).unsqueeze(-1), shares[..., 1:].to(q.dtype)
            out = _product(shares, values, onto=_per_head(out * of_sequence, k)).view_as(q).to(q.dtype)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, shares)
        ctx.kernel, ctx.extra, ctx.buffer, ctx.length, ctx.first = kernel, extra, buffer, length, tick is None
        return out, q.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        tape, of_unread, shape = ctx.buffer.tape, ctx.needs_input_grad[6:], ctx.saved_tensors[1].shape
        grads, of_writes = (None, None, None), (None,) * len(of_unread)
        with torch.autocast(ctx.saved_tensors[0].device.type, enabled=False):
            if grad is not None:
                grads = DepthAttention._read(ctx, grad.contiguous())
            if any(of_unread) and tape.in_use:
                pair = tape.gradients(ctx.length - len(of_unread) // 2, ctx.length)
                of_writes = (write.reshape(shape) for of_kind in pair for write in of_kind.unbind(1))
        if ctx.first:
            tape.clear()
        return None, None, *grads, None, *of_writes

    @staticmethod
    def _read(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients on q, k and v; leaves on the tape what those on the writes take."""
        q, k, v, out, lse, shares = ctx.saved_tensors
        grad_q, grad_k, grad_v = ctx.kernel.backward(grad, q, k, v, out, lse, ctx.extra)
        keys, values = ctx.buffer.front(ctx.length, q.dtype)
        grad_NGd = _per_head(grad, k)
        along_out = _per_head((grad * out).sum(-1, keepdim=True, dtype=lse.dtype), k)
        grad_logits = _product(grad_NGd, values.mT).sub_(along_out).mul_(shares)
        grad_logits = ctx.buffer.tape.add(_per_head(q, k), grad_NGd, shares, grad_logits)
        grad_q = _product(grad_logits, keys, onto=_per_head(grad_q, k), scale=1 / math.sqrt(q.shape[-1]))
        return grad_q.view_as(q).to(q.dtype), grad_k, grad_v


class Tape:
    """What the readings of one backward pass leave for the gradients on the writes.

    Readings come with ever fewer writes. PAGE of them are kept as rows of one matrix per token and head. Before the next one comes, what
    they add to the writes that are still open is summed.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._pass: int | None = None
        self._count = PAGE  # rows of the page that are in use
        self._rows: tuple[Tensor, ...] = ()  # grad_logits, shares (N, PAGE, G, J), q, grad (N, PAGE, G, d); zeros where there is none yet
        self._summed: tuple[Tensor, ...] = ()  # of the pages before: gradients on keys and values, (N, J, d)

    @property
    def in_use(self) -> bool:
        """Whether it holds readings of the backward pass under way, not of one that stopped half-way or went another way."""
        return self._pass == torch._C._current_graph_task_id()

    def add(self, q: Tensor, grad: Tensor, shares: Tensor, grad_logits: Tensor) -> Tensor:
        """A reading: its query and the gradient on its output (N, G, d), its shares and the gradients on its scaled logits (N, G, J).

        Gives back the latter in q's precision.
        """
        if not self.in_use:
            self.clear()
            self._pass = torch._C._current_graph_task_id()
        writes = shares.shape[-1]
        if self._count == PAGE:
            if self._rows:
                self._summed = self.gradients(0, writes)
            self._count, self._rows = 0, tuple(q.new_zeros(len(row), PAGE, *row.shape[1:]) for row in (shares, shares, q, grad))
        rows = [of_page[:, self._count] for of_page in self._rows]
        rows[:2] = (row[..., :writes] for row in rows[:2])
        for row, part in zip(rows, (grad_logits, shares, q, grad), strict=True):
            row.copy_(part)
        self._count += 1
        return rows[0].to(q.dtype)

    def gradients(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """The gradients on the keys and on the values of writes first, ..., last - 1, (N, last - first, d) each."""
        grad_logits, shares, q, grad = (rows.flatten(1, 2) for rows in self._rows)
        of_keys = _product(grad_logits[..., first:last].mT, q, scale=1 / math.sqrt(q.shape[-1]))
        of_values = _product(shares[..., first:last].mT, grad)
        for total, summed in zip((of_keys, of_values), self._summed, strict=False):
            total += summed[:, first:last]
        return of_keys, of_values


def _per_head(x_BTHd: Tensor, k_BTKd: Tensor) -> Tensor:
    """(N, G, d): the query heads that share a key/value head, as the rows of a matrix."""
    n_kv_head = k_BTKd.shape[2]
    return x_BTHd.reshape(-1, x_BTHd.shape[2] // n_kv_head, x_BTHd.shape[3])


def _product(a: Tensor, b: Tensor, *, onto: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """scale a b, a batch of matrix products, added to ``onto``, in its place where it can be; of halves, summed and given in fp32."""
    if a.dtype in (torch.float32, torch.float64):
        return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=scale) if onto is None else onto.baddbmm_(a, b, alpha=scale)
    product = torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())
    return product.mul_(scale) if onto is None else product.mul_(scale).add_(onto)
