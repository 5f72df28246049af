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
            logits = _product(_per_head(q, k), keys.mT).mul_(1 / math.sqrt(q.shape[-1]))
            shares = torch.cat((lse.reshape(*logits.shape[:2], 1), logits), -1).log_softmax(-1)
            lse = lse - shares[..., 0].view_as(lse)  # of both parts: a share's logarithm is what it stands for less the whole
            shares = shares.exp_()
            of_sequence, shares = shares[..., 0].view_as(lse), shares[..., 1:].to(q.dtype)
            out = torch.addcmul(_product(shares, values).view_as(q), out, of_sequence.unsqueeze(-1)).to(q.dtype)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, shares)
        ctx.kernel, ctx.extra, ctx.buffer, ctx.length, ctx.first = kernel, extra, buffer, length, tick is None
        return out, q.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        tape, of_unread = ctx.buffer.tape, ctx.needs_input_grad[6:]
        with torch.autocast(ctx.saved_tensors[0].device.type, enabled=False):
            grads = (None, None, None) if grad is None else DepthAttention._read(ctx, grad)
            writes = len(of_unread) // 2
            pulled = tape.gradients(ctx.length - writes, ctx.length) if any(of_unread) else None
        if ctx.first:
            tape.clear()
        if pulled is None:
            return None, None, *grads, None, *(None for _ in of_unread)
        shape = ctx.saved_tensors[1].shape
        return None, None, *grads, None, *(grad.view(shape) for of_kind in pulled for grad in of_kind)

    @staticmethod
    def _read(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients on q, k and v; leaves on the tape what those on the writes take."""
        q, k, v, out, lse, shares = ctx.saved_tensors
        grad_q, grad_k, grad_v = ctx.kernel.backward(grad, q, k, v, out, lse, ctx.extra)
        keys, values = ctx.buffer.front(ctx.length, q.dtype)
        q_NGd, grad_NGd = _per_head(q, k), _per_head(grad, k)
        along_out = _per_head((grad * out).sum(-1, keepdim=True, dtype=lse.dtype), k)
        grad_logits = _product(grad_NGd, values.mT).sub_(along_out).mul_(shares).mul_(1 / math.sqrt(q.shape[-1])).to(q.dtype)
        grad_q = grad_q + _product(grad_logits, keys).view_as(q)
        ctx.buffer.tape.add(q_NGd, grad_NGd, shares, grad_logits)
        return grad_q.to(q.dtype), grad_k, grad_v


class Tape:
    """What the readings of one backward pass leave for the gradients on the writes."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._task, self._pages = None, []

    def add(self, q: Tensor, grad: Tensor, shares: Tensor, grad_logits: Tensor) -> None:
        """A reading: its query and the gradient on its output (N, G, d), and its shares and the gradients on its logits (N, G, J)."""
        if self._task != _backward_pass():  # an earlier pass that stopped half-way, or went another way through the graph
            self._task, self._pages = _backward_pass(), []
        if not self._pages or self._pages[-1].full:
            self._pages.append(Page(q, shares))
        self._pages[-1].add(q, grad, shares, grad_logits)

    def gradients(self, first: int, last: int) -> tuple[Tensor, Tensor] | None:
        """The gradients on the keys and the values of writes first, ..., last - 1, (last - first, N, d) each; None if there are none."""
        if self._task != _backward_pass():
            return None
        parts = (page.gradients(first, last) for page in self._pages)
        return tuple(sum(of_kind[1:], of_kind[0]).transpose(0, 1) for of_kind in map(list, zip(*parts, strict=True)))


class Page:
    """Up to PAGE readings, side by side. Readings come with ever fewer writes; rows of zeros stand for those to come."""

    def __init__(self, q: Tensor, shares: Tensor) -> None:
        self.count = 0
        self.q, self.grad = (q.new_zeros(q.shape[0], PAGE, *q.shape[1:]) for _ in range(2))
        self.shares, self.grad_logits = (q.new_zeros(q.shape[0], PAGE, *shares.shape[1:]) for _ in range(2))

    @property
    def full(self) -> bool:
        return self.count == PAGE

    def add(self, q: Tensor, grad: Tensor, shares: Tensor, grad_logits: Tensor) -> None:
        self.q[:, self.count], self.grad[:, self.count] = q, grad
        writes = shares.shape[-1]
        self.shares[:, self.count, :, :writes], self.grad_logits[:, self.count, :, :writes] = shares, grad_logits
        self.count += 1

    def gradients(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        pairs = ((self.grad_logits, self.q), (self.shares, self.grad))
        return tuple(_product(weights.flatten(1, 2)[..., first:last].mT, rows.flatten(1, 2)) for weights, rows in pairs)


def _backward_pass() -> int:
    """A number of the backward pass under way, which no other has."""
    return torch._C._current_graph_task_id()


def _per_head(x_BTHd: Tensor, k_BTKd: Tensor) -> Tensor:
    """(N, G, d): the query heads that share a key/value head, as the rows of a matrix."""
    n_kv_head = k_BTKd.shape[2]
    return x_BTHd.reshape(-1, x_BTHd.shape[2] // n_kv_head, x_BTHd.shape[3])


def _product(a: Tensor, b: Tensor) -> Tensor:
    """A batch of matrix products; of halves, summed and given back in fp32."""
    if a.dtype in (torch.float32, torch.float64):
        return torch.bmm(a, b)
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())
