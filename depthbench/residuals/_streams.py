"""What hyper-connections share: a depth state of n streams, and how a sublayer reads, mixes and writes them.

    h  = sum_s read[s] x_s,      x+_t = sum_s mix[t, s] x_s + write[t] F(h)          (Step below holds the three coefficients)

Each of the three operations on streams is stated twice: as its equation, which is what gets compiled, and as an autograd function that
does the same in few passes over memory where nothing fuses for us. The functions save the streams (the same ones, once), the
coefficients and F's output; mixed streams are never stored besides those that they become.

``project`` and ``read_streams`` hand the streams on, unchanged, for the next operation to take. So the gradient on the streams is one
buffer, made by ``write_streams`` and added to in place by the other two, where autograd would sum three. It has one owner at a time:
streams that were handed on are used once or not at all.

Streams and coefficients are in the parameters' precision whatever autocast says.
B batch, T time, N = B*T tokens, S streams, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from depthbench.errors import UserError
from depthbench.nn.config import ModelConfig
from depthbench.nn.sublayer import Sublayer
from depthbench.residuals.base import LinearForm, Residual

MOST_STREAMS = 64  # the papers go to 8; coefficients grow with the square


class Streams(NamedTuple):
    """The state: n residual streams."""

    x: Tensor  # (B, T, S, D)


class Step(NamedTuple):
    """One sublayer's coefficients per token."""

    read: Tensor  # (B, T, S)
    mix: Tensor  # (B, T, S, S), [new stream, old stream]
    write: Tensor  # (B, T, S)


class HyperConnections(Residual):
    """A design with n streams. The subclass builds ``connections``, one module per sublayer, and says what ``step`` they make."""

    connections: nn.ModuleList
    slots = "streams"
    exempt_from_decay: tuple[str, ...]  # names of a connection's parameters

    def __init__(self, config: ModelConfig, *, streams: int, scale_branch_init: bool, norm_then_sum: bool, mix_eps: float | None) -> None:
        super().__init__(config)
        if not 1 <= streams <= MOST_STREAMS:
            raise UserError(f"streams is {streams}: give a whole number from 1 to {MOST_STREAMS}")
        if mix_eps is not None and not 0 < mix_eps < 1:
            raise UserError(f"mix_eps is {mix_eps}: give a number between 0 and 1, such as 1e-6, or null for norm_eps")
        self.streams = streams
        self.scale_branch_init = scale_branch_init
        self.norm_then_sum = norm_then_sum
        self.mix_eps = config.norm_eps if mix_eps is None else mix_eps
        self._connect, self._write = connect, write_streams

    @staticmethod
    def step(streams: Tensor, *arguments: Any) -> tuple[Step, Tensor]:
        """A sublayer's coefficients from streams (B, T, S, D) and ``arguments``, and the streams handed on. Compiled: sees no index."""
        raise NotImplementedError

    def arguments(self, *, sublayer: int) -> tuple[Any, ...]:
        """What ``step`` needs for ``sublayer`` (from 0) besides the streams: parameters, and constants that all sublayers share."""
        raise NotImplementedError

    def build_sublayer(self, config: ModelConfig, *, sublayer: int) -> Sublayer:
        built = super().build_sublayer(config, sublayer=sublayer)
        if self.scale_branch_init:
            output = built.core.down_proj if sublayer % 2 else built.core.o_proj
            output.std /= math.sqrt(self.streams)
        return built

    def compile_regions(self, compile_region: Callable[[Callable], Callable]) -> None:
        self._connect, self._write = compile_region(connect), compile_region(write_streams)

    def open(self, embedding: Tensor) -> Streams:
        return Streams(embedding.unsqueeze(-2).expand(-1, -1, self.streams, -1).contiguous())

    def read(self, state: Streams, *, sublayer: int) -> tuple[Tensor, Any]:
        branch_in, mix, write, streams = self._connect(state.x, self.step, *self.arguments(sublayer=sublayer))
        return branch_in, (streams, mix, write)

    def write(self, state: Streams, carry: Any, branch_out: Tensor, emitted: Any, *, sublayer: int) -> Streams:
        return Streams(self._write(*carry, branch_out))

    def close(self, state: Streams, final_norm: nn.Module, *, block: int) -> Tensor:
        return final_norm(state.x).sum(-2) if self.norm_then_sum else super().close(state, final_norm, block=block)

    def depth_state(self, state: Streams, *, block: int) -> Tensor:
        return state.x.flatten(-2)

    def readout(self, state: Streams, *, block: int) -> Tensor:
        return state.x.sum(-2)

    def stream(self, state: Streams) -> Tensor:
        return state.x

    def with_stream(self, state: Streams, stream: Tensor) -> Streams:
        return Streams(stream)

    def skip(self, state: Streams, *, block: int, rule: str | None = None) -> Streams:
        self.skip_rule(rule)
        return state

    def swap_parameters(self, blocks: nn.ModuleList, *, block: int) -> dict[str, Tensor]:
        """All weights of the block and of its two connections: with them goes the stream that each of its sublayers started from."""
        roles = super().swap_parameters(blocks, block=block)
        for sublayer, name in ((2 * block, "attention"), (2 * block + 1, "feed_forward")):
            roles |= {f"{name}_connection.{role}": value for role, value in self.connections[sublayer].named_parameters()}
        return roles

    def linear(self, state: Streams, *, sublayer: int, branch_out: Tensor | None = None) -> LinearForm:
        if sublayer == self.config.n_sublayer:
            return LinearForm(state.x.new_ones(1, 1, self.streams), None, None)
        with full_precision(state.x):
            step, _ = self.step(state.x, *self.arguments(sublayer=sublayer))
        return LinearForm(*step)

    def no_decay_parameters(self) -> Iterable[nn.Parameter]:
        for connection in self.connections:
            yield from (parameter for name, parameter in connection.named_parameters() if name in self.exempt_from_decay)


# Operations on streams ------------------------------------------------------------------------------------------------------------


def connect(streams: Tensor, step: Callable[..., tuple[Step, Tensor]], *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Coefficients and what the sublayer reads with them: (h (B, T, D), mix, write, streams)."""
    with full_precision(streams):
        (read, mix, write), streams = step(streams, *arguments)
        h, streams = read_streams(streams, read)
    return h, mix, write, streams


def project(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms(x) weight^T, x) for x (..., K) and weight (J, K); rms has no weight and divides by sqrt(mean(x^2) + eps).

    The division commutes with the product, so that the normalised x is never made.
    """
    if torch.compiler.is_compiling():
        return x @ weight.mT * (x.square().mean(-1, keepdim=True) + eps).rsqrt(), x
    return _Project.apply(x, weight, eps)


def read_streams(streams: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
    """(sum_s read[s] x_s, streams)."""
    if torch.compiler.is_compiling():
        return (read.unsqueeze(-1) * streams).sum(-2), streams
    return _Read.apply(streams, read)


def write_streams(streams: Tensor, mix: Tensor, write: Tensor, branch_out: Tensor) -> Tensor:
    """sum_s mix[t, s] x_s + write[t] branch_out, (B, T, S, D)."""
    if torch.compiler.is_compiling():
        mixed = (mix.unsqueeze(-1) * streams.unsqueeze(-3)).sum(-2)
        return torch.addcmul(mixed, write.unsqueeze(-1), branch_out.to(streams.dtype).unsqueeze(-2))
    return _Write.apply(streams, mix, write, branch_out)


def full_precision(x: Tensor) -> AbstractContextManager:
    """Switches autocast off, where it is on."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        with full_precision(x):
            scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            z = (x.flatten(0, -2) @ weight.mT).view(*x.shape[:-1], -1).mul_(scale)
        ctx.save_for_backward(x, weight, scale, z)
        return z, x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor, dx: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale, z = ctx.saved_tensors
        with full_precision(x):
            along_x = (dz * z).sum(-1, keepdim=True).mul_(scale.square()).div_(-x.shape[-1])  # through the norm
            dxw = (dz * scale).reshape(-1, z.shape[-1])
            dx = dx.contiguous().addcmul_(x, along_x)
            dx.view(-1, x.shape[-1]).addmm_(dxw, weight)
            return dx, dxw.mT @ x.flatten(0, -2), None


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, streams: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(streams, read)
        with full_precision(streams):
            return torch.bmm(_row(read), streams.flatten(0, 1)).view_as(streams[..., 0, :]), streams

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor, dstreams: Tensor) -> tuple[Tensor, Tensor]:
        streams, read = ctx.saved_tensors
        with full_precision(streams):
            dread = torch.bmm(_row(dh), streams.flatten(0, 1).mT).view_as(read)
            return dstreams.contiguous().addcmul_(read.unsqueeze(-1), dh.unsqueeze(-2)), dread


class _Write(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, streams: Tensor, mix: Tensor, write: Tensor, branch_out: Tensor) -> Tensor:
        ctx.save_for_backward(streams, mix, write, branch_out)
        with full_precision(streams):
            new = write.unsqueeze(-1) * branch_out.to(streams.dtype).contiguous().unsqueeze(-2)  # laid out as the streams are
            new.view(-1, *new.shape[2:]).baddbmm_(mix.flatten(0, 1), streams.flatten(0, 1))
        return new

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dnew: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        streams, mix, write, branch_out = ctx.saved_tensors
        dnew_NSD = dnew.reshape(-1, *dnew.shape[2:])
        with full_precision(streams):
            dstreams = torch.bmm(mix.flatten(0, 1).mT, dnew_NSD).view_as(streams)
            dmix = torch.bmm(dnew_NSD, streams.flatten(0, 1).mT).view_as(mix)
            dwrite = torch.bmm(_row(branch_out.to(streams.dtype)), dnew_NSD.mT).view_as(write)
            dbranch_out = torch.bmm(_row(write), dnew_NSD).view_as(branch_out).to(branch_out.dtype)
        return dstreams, dmix, dwrite, dbranch_out


def _row(vectors: Tensor) -> Tensor:
    """(B, T, width) -> (N, 1, width). A row times a transposed matrix runs twice as fast as that matrix times a column, and strided
    rows would be multiplied one by one."""
    return vectors.reshape(-1, 1, vectors.shape[-1]).contiguous()
