"""Causal attention that gives its log-sum-exp, and a backward pass that takes another: what merging it with a second softmax needs.

    out_t = sum_s e^(l_ts - lse_t) v_s,    lse_t = log sum_s e^l_ts,    l_ts = q_t . k_s / sqrt(d),    s <= t

``forward(q, k, v) -> (out, lse, extra)`` and ``backward(grad, q, k, v, out, lse, extra) -> (grad_q, grad_k, grad_v)``. The backward pass
of fused attention rebuilds its shares from the lse that it is given, and the term grad . out from the out. Given those of a softmax over
more logits than its own, it gives the exact gradients of its own part.

Neither is differentiable: they are for autograd functions. Which kernel runs depends on device, precision and size; ``PLAIN`` takes
anything.
B batch, T time, H query heads, K key/value heads, G = H/K, d head width. q, out (B, T, H, d), k, v (B, T, K, d), lse (B, T, H) in fp32
or, for fp64, fp64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn import functional as F

aten = torch.ops.aten


class Kernel(NamedTuple):
    forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Any]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Any], tuple[Tensor, Tensor, Tensor]]


def kernel_for(q: Tensor, k: Tensor, v: Tensor) -> Kernel:
    """The fastest kernel that takes these."""
    if q.device.type == "cpu":
        return CPU
    if q.is_cuda:
        if can_use_flash_attention(_params(q, k, v)):
            return FLASH
        if can_use_efficient_attention(_params(q, *_repeated(q, k, v))):
            return EFFICIENT
    return PLAIN


def _params(*qkv: Tensor) -> SDPAParams:
    q, k, v = _padded(*qkv)
    return SDPAParams(q, k, v, None, 0.0, True, q.shape[1] != k.shape[1])


# Plain: whole rows of logits, on any device and in any precision -----------------------------------------------------------------


def _shares(q: Tensor, k: Tensor, lse: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(B, K, G, T, T) shares, in no less than fp32, and the lse (B, T, H) they are relative to, by default their own."""
    q, k = _heads_first(q, k.shape[2]), _heads_first(k, k.shape[2])
    logits = (q @ k.mT) / math.sqrt(q.shape[-1])
    later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    logits = logits.masked_fill_(later, -math.inf)
    if lse is None:
        lse = logits.logsumexp(-1).flatten(1, 2).transpose(1, 2)
    return (logits - lse.transpose(1, 2).unflatten(1, q.shape[1:3]).unsqueeze(-1)).exp_(), lse


def _heads_first(x_BTHd: Tensor, n_kv_head: int) -> Tensor:
    """(B, K, G, T, d), in no less than fp32."""
    return x_BTHd.to(torch.promote_types(x_BTHd.dtype, torch.float32)).unflatten(2, (n_kv_head, -1)).permute(0, 2, 3, 1, 4)


def _heads_last(x_BKGTd: Tensor, like: Tensor) -> Tensor:
    return x_BKGTd.permute(0, 3, 1, 2, 4).flatten(2, 3).to(like.dtype)


def _plain_forward(q, k, v):
    shares, lse = _shares(q, k)
    return _heads_last(shares @ _heads_first(v, v.shape[2]), q), lse, None


def _plain_backward(grad, q, k, v, out, lse, extra):
    shares, _ = _shares(q, k, lse)
    n_kv_head, scale = k.shape[2], 1 / math.sqrt(q.shape[-1])
    q_, k_, v_, grad_, out_ = (_heads_first(x, n_kv_head) for x in (q, k, v, grad, out))
    grad_logits = shares * (grad_ @ v_.mT - (grad_ * out_).sum(-1, keepdim=True)) * scale
    of_k, of_v = (products.sum(2, keepdim=True) for products in (grad_logits.mT @ q_, shares.mT @ grad_))
    return _heads_last(grad_logits @ k_, q), _heads_last(of_k, k), _heads_last(of_v, v)


PLAIN = Kernel(_plain_forward, _plain_backward)


# Fused. PyTorch's kernels take (B, H, T, d) ---------------------------------------------------------------------------------------


def _flipped(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(B, T, H, ...) <-> (B, H, T, ...), as views."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def _cpu_forward(q, k, v):
    """All precisions, shared heads and head widths."""
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*_flipped(q, k, v), 0.0, True)
    return *_flipped(out, lse), None


def _cpu_backward(grad, q, k, v, out, lse, extra):
    return _flipped(*aten._scaled_dot_product_flash_attention_for_cpu_backward(*_flipped(grad, q, k, v, out, lse), 0.0, True))


CPU = Kernel(_cpu_forward, _cpu_backward)


def _padded(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(B, T, H, d) -> (B, H, T, d'), d' the next multiple of 8, which the CUDA kernels ask for. Zeros change no product."""
    return _flipped(*(F.pad(tensor, (0, -tensor.shape[-1] % 8)) if tensor.shape[-1] % 8 else tensor for tensor in tensors))


def _unpadded(tensors, width: int) -> tuple[Tensor, ...]:
    return tuple(tensor.transpose(1, 2)[..., :width] for tensor in tensors)


def _flash_forward(q, k, v):
    """fp16 and bf16, shared heads included."""
    scale = 1 / math.sqrt(q.shape[-1])
    out, lse, *extra, _ = aten._scaled_dot_product_flash_attention(*_padded(q, k, v), 0.0, True, scale=scale)
    return *_unpadded([out], q.shape[-1]), lse.transpose(1, 2), extra


def _flash_backward(grad, q, k, v, out, lse, extra):
    scale, lse_BHT = 1 / math.sqrt(q.shape[-1]), lse.transpose(1, 2).contiguous()
    *lengths, seed, offset = extra
    grads = aten._scaled_dot_product_flash_attention_backward(
        *_padded(grad, q, k, v, out), lse_BHT, *lengths, 0.0, True, seed, offset, scale=scale
    )
    return _unpadded(grads, q.shape[-1])


FLASH = Kernel(_flash_forward, _flash_backward)


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with each head repeated for its group of queries."""
    group = q.shape[2] // k.shape[2]
    return (k, v) if group == 1 else (k.repeat_interleave(group, 2), v.repeat_interleave(group, 2))


def _efficient_forward(q, k, v):
    """fp32 too, but no shared heads; its lse is longer than T, with room that only its backward pass knows the use of."""
    qkv, scale = _padded(q, *_repeated(q, k, v)), 1 / math.sqrt(q.shape[-1])
    out, lse, *seeds = aten._scaled_dot_product_efficient_attention(*qkv, None, True, 0.0, True, scale=scale)
    return *_unpadded([out], q.shape[-1]), lse[..., : q.shape[1]].transpose(1, 2), (lse, *seeds)


def _efficient_backward(grad, q, k, v, out, lse, extra):
    scale, (own_lse, *seeds) = 1 / math.sqrt(q.shape[-1]), extra
    lse_BHT = own_lse.clone()
    lse_BHT[..., : q.shape[1]] = lse.transpose(1, 2)
    grad, q_, k_, v_, out = _padded(grad, q, *_repeated(q, k, v), out)
    grads = aten._scaled_dot_product_efficient_attention_backward(
        grad, q_, k_, v_, None, out, lse_BHT, *seeds, 0.0, [True, True, True, False], True, scale=scale
    )
    of_q, of_k, of_v = _unpadded(grads[:3], q.shape[-1])
    return of_q, *(of_heads.unflatten(2, (k.shape[2], -1)).sum(3) for of_heads in (of_k, of_v))


EFFICIENT = Kernel(_efficient_forward, _efficient_backward)
