"""Softmax mixes over depth whose cost and memory grow slowly: the machinery that both designs of Attention Residuals stand on.

    s_{k,i} = w_k . rms(v_i),    h_k = sum_i p_{k,i} v_i,    p_k = softmax(s_k)    over the sources i that mix k reads

Straightforwardly, every mix reads all its sources, and in the backward pass autograd adds to the gradient of each of them again. Here:

- *Two phases.* The queries w_k do not depend on the input. Mixes are taken in rounds; at its start, a round mixes the sources known by
  then for all its queries at once, so each is read once per round. What a mix reads beyond them (sources stored during the round, and
  a running sum that nobody reads later) is merged in by an online softmax. Rounds of sqrt(M) balance the two phases.
- *Gradients are pulled.* The backward of a mix only leaves its gradient g_k, and delta_k = g_k . h_k, on a tape. When the node that
  registered a source runs, all mixes that read it have left theirs, and its gradient is one product:

      e_{k,i} = p_{k,i} (g_k . v_i - delta_k) r_i
      dv_i    = sum_k p_{k,i} g_k + sum_k e_{k,i} w_k - (r_i / D) (sum_k e_{k,i} s_{k,i}) v_i,    dw_k = sum_i e_{k,i} v_i

  with r_i = (mean v_i^2 + eps)^(-1/2), exact for any eps. Of a round, the mixes of later rounds are pulled for all sources at once.
- *Ticks* make the order certain: registering sources returns an empty tensor that the next registration and every mix take as an input.
  It carries no gradient, but an edge of the graph: the engine runs a registration's backward after that of all that came later.
- Kept are the sources, their r_i and the mixes' log-sum-exp; logits and weights are made again in the backward pass.

Everything is computed in the precision of the queries, under autocast too. There are no second derivatives.

N tokens (B T), D width, n sources, K mixes, M = 2L mixes in all. Mixes k count from 1, sources from 0.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def without_autocast(tensor: Tensor) -> AbstractContextManager:
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def rstd(values: Tensor, eps: float) -> Tensor:
    """(..., D) -> 1 / sqrt(mean(x^2) + eps), (...)."""
    return (torch.linalg.vecdot(values, values) / values.shape[-1] + eps).rsqrt_()


def empty_rows(like: Tensor, count: int, tokens: int, width: int) -> Tensor:
    """(count, N, D), each row contiguous, the rows an odd number of cache lines apart: products over rows walk down this stride, and at a
    power of two all rows of a token would compete for the same few lines of the cache."""
    lines = -(-tokens * width // 16) | 1
    return like.new_empty(count, 16 * lines)[:, : tokens * width].unflatten(1, (tokens, width))


class Rows:
    """The sources of a run, one contiguous row each, in one buffer that is only ever appended to."""

    def __init__(self, like: Tensor, shape: torch.Size, capacity: int, eps: float) -> None:
        self.shape, self.eps, self.count = shape, eps, 0
        with torch.inference_mode(False):  # else rows made during validation could not be added to by a run outside it
            self.values = empty_rows(like, capacity, shape[:-1].numel(), shape[-1])  # (n, N, D)
            self.rstd = like.new_empty(self.values.shape[:2])  # (n, N)

    def append(self, first: Tensor, second: Tensor | None = None) -> Tensor:
        """Stores a source, or the sum of two terms; returns it as it lies in the buffer, (B, T, D), with a version counter of its own."""
        row = self.values[self.count].view(self.shape)
        if second is None:
            row.copy_(first)
        else:
            torch.add(first, second, out=row)
        self.rstd[self.count] = rstd(self.values[self.count], self.eps)
        self.count += 1
        return row.data


class Round(NamedTuple):
    """Mixes [start, stop) over the first ``known`` sources, and what a later source adds."""

    start: int
    stop: int
    known: int
    values: Tensor  # (N, K, D): the mixes over the known sources alone
    lse: Tensor  # (N, K)
    near: list[Tensor]  # (N, K) each: the logits of every source stored since


class Gradients:
    """What one backward pass leaves on the tape."""

    def __init__(self, tape: Tape, task: int) -> None:
        rows, n_mix = tape.rows, tape.n_mix
        self.task = task
        self.of_mixes = empty_rows(rows.values, n_mix, *rows.values.shape[1:]).zero_()  # (M, N, D): g_k
        self.delta = rows.values.new_zeros(rows.values.shape[1], n_mix)  # (N, M)
        self.of_weights = torch.zeros_like(tape.weights)  # (M, D)
        self.far: dict[int, Tensor] = {}  # first source of a round -> gradients of the round's sources from the mixes of later rounds


class Tape:
    """What one run knows of its mixes. It holds no tensor that has a graph: the graph's nodes hold the tape."""

    def __init__(self, rows: Rows, group_size: int, n_mix: int, position: int) -> None:
        self.rows, self.group_size, self.n_mix = rows, group_size, n_mix
        self.position = position  # the mix that is read next
        self.weights: Tensor  # (M, D): w_k, set where the graph begins
        self.wants_weights: bool  # whether their gradient is asked for
        with torch.inference_mode(False):  # as for the rows; (N, M); of a mix that was never made, inf: no weight
            self.lse = rows.values.new_full((rows.values.shape[1], n_mix), torch.inf)
        self.first: list[int] = []  # per source, the first mix that reads it
        self.round: Round | None = None
        self.rounds: list[tuple[int, int]] = []  # (known sources, first mix) of all rounds so far
        self._gradients: Gradients | None = None

    # Forward ------------------------------------------------------------------------------------------------------------------

    def register(self, count: int) -> None:
        """The next ``count`` rows are sources of every mix from now on."""
        for _ in range(count):
            if self.round is not None and self.position < self.round.stop:
                self.round.near.append(self._near(len(self.first), self.round.start, self.round.stop))
            self.first.append(self.position)

    def mix(self, k: int, running: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """h_k (N, D) over all sources, and a running sum (N, D) if any; and of that sum (p, s, r), (N) each."""
        if self.round is None or k >= self.round.stop:
            self.round = self._open_round(k)
        start, _, known, values, lse, near = self.round
        j, m = k - start, len(near)
        logits, of_running = [lse[:, j], *(logit[:, j] for logit in near)], ()
        if running is not None:
            scale = rstd(running, self.rows.eps)
            logits.append(torch.mv(running, self.weights[k - 1]) * scale)
        logits = torch.stack(logits, -1)
        self.lse[:, k - 1] = logits.logsumexp(-1)
        shares = (logits - self.lse[:, k - 1 : k]).exp_()
        mixed = values[:, j] * shares[:, :1]
        if m:
            stored = self.rows.values[known : known + m].transpose(0, 1)
            mixed = torch.baddbmm(mixed.unsqueeze(1), shares[:, None, 1 : m + 1], stored).squeeze(1)
        if running is not None:
            mixed = mixed.addcmul_(shares[:, -1:], running)
            of_running = (shares[:, -1].clone(), logits[:, -1].clone(), scale)
        return mixed, of_running

    def _open_round(self, k: int) -> Round:
        """The round of mix k. Where rounds begin, and what is known there, depends on k alone: a restarted run rounds as the full one."""
        length = max(8, math.isqrt(self.n_mix))
        groups = max(self.group_size, length - length % self.group_size)  # a round takes whole groups; a group that is longer, whole rounds
        base = k // groups * groups
        begin = base + (k - base) // length * length
        start, stop = max(1, begin), min(begin + length, base + groups, self.n_mix + 1)
        known = min(len(self.first), begin // self.group_size + 1)
        stored, weights = self.rows.values[:known], self.weights[start - 1 : stop - 1]
        logits = torch.bmm(stored, weights.T.expand(known, -1, -1)).mul_(self.rows.rstd[:known, :, None])  # (n, N, K)
        largest = logits.amax(0)
        shares = logits.sub_(largest).exp_()
        total = shares.sum(0)
        values = torch.bmm(shares.div_(total).permute(1, 2, 0), stored.transpose(0, 1))
        self.rounds.append((known, k))
        near = [self._near(row, start, stop) for row in range(known, len(self.first))]
        return Round(start, stop, known, values, largest.add_(total.log_()), near)

    def _near(self, row: int, start: int, stop: int) -> Tensor:
        return (self.rows.values[row] @ self.weights[start - 1 : stop - 1].T).mul_(self.rows.rstd[row, :, None])

    # Backward -----------------------------------------------------------------------------------------------------------------

    @property
    def gradients(self) -> Gradients:
        """Of the backward pass under way: what an earlier one left behind, having ended before the sources, is none of its business."""
        task = torch._C._current_graph_task_id()
        if self._gradients is None or self._gradients.task != task:
            self._gradients = Gradients(self, task)
        return self._gradients

    def release(self) -> None:
        self._gradients = None

    def pull(self, row: int) -> Tensor:
        """The gradient (N, D) of the source in ``row`` through every mix that read it."""
        gradients = self.gradients
        turn = bisect_right(self.rounds, row, key=lambda of_round: of_round[0])
        begin = self.rounds[turn - 1][0] if turn else 0
        end, far = self.rounds[turn] if turn < len(self.rounds) else (len(self.first), self.position + 1)
        if begin not in gradients.far:
            gradients.far[begin] = self._pull(begin, end, far, self.position + 1)
        pulled = gradients.far[begin][:, row - begin]
        if turn and self.first[row] < far:
            pulled += self._pull(row, row + 1, self.first[row], far)[:, 0]
        return pulled

    def _pull(self, begin: int, end: int, first: int, stop: int) -> Tensor:
        """Gradients (N, n, D) of the sources [begin, end) through the mixes [first, stop), all of which read all of them."""
        values, scale = self.rows.values[begin:end], self.rows.rstd[begin:end, :, None]  # (n, N, D), (n, N, 1)
        by_token = values.transpose(0, 1)
        stop = min(stop, self.n_mix + 1)
        if first >= stop:
            return values.new_zeros(by_token.shape)
        mixes = slice(first - 1, stop - 1)
        weights, of_mixes = self.weights[mixes], self.gradients.of_mixes[mixes].transpose(0, 1)  # (K, D), (N, K, D)
        logits = torch.bmm(values, weights.T.expand(end - begin, -1, -1)).mul_(scale)  # (n, N, K)
        shares = (logits - self.lse[:, mixes]).exp_()
        dots = torch.bmm(by_token, of_mixes.transpose(1, 2)).transpose(0, 1)
        errors = (dots - self.gradients.delta[:, mixes]).mul_(shares).mul_(scale)
        pulled = torch.bmm(shares.transpose(0, 1), of_mixes)
        by_source = pulled.transpose(0, 1)
        by_source += errors @ weights
        by_source -= torch.linalg.vecdot(errors, logits).unsqueeze(-1).mul_(scale / values.shape[-1]) * values
        self.gradients.of_weights[mixes] += torch.bmm(errors.transpose(1, 2), values).sum(0)
        return pulled


class Begin(Function):
    """(tape, queries (M, D), key norms (M, D)) -> the first tick. Its backward runs last and gathers the gradient of w = norm * query."""

    @staticmethod
    def forward(ctx, tape: Tape, queries: Tensor, key_norms: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.tape = tape
        ctx.save_for_backward(queries, key_norms)
        tape.weights = queries * key_norms
        tape.wants_weights = any(ctx.needs_input_grad)
        return queries.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, _):
        queries, key_norms = ctx.saved_tensors
        of_weights = ctx.tape.gradients.of_weights
        ctx.tape.release()
        return None, of_weights * key_norms, of_weights * queries


class Store(Function):
    """(rows, one or two terms (B, T, D)) -> their sum as a row of the buffer, of which it is the only copy."""

    @staticmethod
    def forward(ctx, rows: Rows, first: Tensor, second: Tensor | None) -> Tensor:
        with without_autocast(first):
            return rows.append(first, second)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return None, gradient, gradient if ctx.needs_input_grad[2] else None


class Register(Function):
    """(tape, the last tick, sources (B, T, D) that lie in the next rows) -> a tick. Its backward pulls the gradients of the sources."""

    @staticmethod
    def forward(ctx, tape: Tape, tick: Tensor, *sources: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.tape, ctx.begin = tape, len(tape.first)
        with without_autocast(tick):
            tape.register(len(sources))
        return tick.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, _):
        tape, shape = ctx.tape, ctx.tape.rows.shape
        pulled: list[Tensor | None] = []
        with without_autocast(tape.rows.values):
            for source, wanted in reversed([*enumerate(ctx.needs_input_grad[2:])]):
                # Weights gather their gradient as sources do; without them, a source that wants none costs nothing.
                wanted = wanted or tape.wants_weights
                pulled.append(tape.pull(ctx.begin + source).view(shape) if wanted else None)
        return None, None, *reversed(pulled)


class DepthMix(Function):
    """(tape, k, the last tick, a running sum (B, T, D) or None) -> h_k (B, T, D). Only the running sum gets its gradient here."""

    @staticmethod
    def forward(ctx, tape: Tape, k: int, tick: Tensor, running: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.tape, ctx.k = tape, k
        flat = None if running is None else running.reshape(-1, running.shape[-1])
        with without_autocast(tick):
            mixed, of_running = tape.mix(k, flat)
        mixed = mixed.view(tape.rows.shape)
        ctx.save_for_backward(mixed, flat, *of_running)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        if gradient is None:
            return None, None, None, None
        mixed, running, *of_running = ctx.saved_tensors
        tape, k, width = ctx.tape, ctx.k, mixed.shape[-1]
        with without_autocast(mixed):
            flat = gradient.reshape(-1, width)
            delta = torch.linalg.vecdot(flat, mixed.view(-1, width))
            gradients = tape.gradients
            gradients.of_mixes[k - 1] += flat
            gradients.delta[:, k - 1] += delta
            if running is None:
                return None, None, None, None
            share, logit, scale = of_running
            error = (torch.linalg.vecdot(flat, running) - delta) * share * scale
            pulled = flat * share.unsqueeze(-1)
            pulled.addr_(error, tape.weights[k - 1]).addcmul_((error * logit * scale).unsqueeze(-1), running, value=-1 / width)
            gradients.of_weights[k - 1] += error @ running
        return None, None, None, pulled.view(mixed.shape)
