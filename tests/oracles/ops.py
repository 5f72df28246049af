"""The pieces of a Llama-style transformer on single vectors. ``w`` is a dict of weights by their names in the state_dict."""

from __future__ import annotations

import cmath
import math

import torch


def norm(x, weight, eps):
    mean_square = x.dot(x) / len(x)
    return weight * (x / (mean_square + eps) ** 0.5)


def layer_norm(x, weight, eps):
    centred = x - x.sum() / len(x)
    variance = centred.dot(centred) / len(x)
    return weight * (centred / (variance + eps) ** 0.5)


def rotated(x, position):
    """Coordinate i and coordinate i + half make a complex number, turned by position * 10000^(-2 i / width)."""
    half = len(x) // 2
    turned = []
    for i in range(half):
        turn = cmath.exp(1j * position * 10000 ** (-2 * i / len(x)))
        turned.append((x[i] * turn.real - x[i + half] * turn.imag, x[i] * turn.imag + x[i + half] * turn.real))
    return torch.stack([first for first, _ in turned] + [second for _, second in turned])


def softmax(logits):
    largest = max(logit.item() for logit in logits)
    exponentials = [(logit - largest).exp() for logit in logits]
    total = sum(exponentials)
    return [value / total for value in exponentials]


def heads(vector, n):
    width = len(vector) // n
    return [vector[i * width : (i + 1) * width] for i in range(n)]


def keys_and_values(w, prefix, h, n_kv_head, eps):
    """Un-rotated keys (after the K-norm, where there is one) and values of one token, per key/value head."""
    keys = heads(w[f"{prefix}.k_proj.weight"] @ h, n_kv_head)
    if f"{prefix}.k_norm.weight" in w:
        keys = [norm(key, w[f"{prefix}.k_norm.weight"], eps) for key in keys]
    return keys, heads(w[f"{prefix}.v_proj.weight"] @ h, n_kv_head)


def attention(w, prefix, h, n_head, n_kv_head, eps, depth=None):
    """h: one normalised vector per token. depth[t]: (keys, values) pairs that token t may also attend to, keys not rotated."""
    stored = [keys_and_values(w, prefix, vector, n_kv_head, eps) for vector in h]
    out = []
    for t, vector in enumerate(h):
        queries = heads(w[f"{prefix}.q_proj.weight"] @ vector, n_head)
        mixed = []
        for head, query in enumerate(queries):
            if f"{prefix}.q_norm.weight" in w:
                query = norm(query, w[f"{prefix}.q_norm.weight"], eps)
            query, shared = rotated(query, t), head // (n_head // n_kv_head)
            keys = [rotated(stored[s][0][shared], s) for s in range(t + 1)]
            values = [stored[s][1][shared] for s in range(t + 1)]
            for depth_keys, depth_values in depth[t] if depth else []:
                keys.append(depth_keys[shared])
                values.append(depth_values[shared])
            weights = softmax([query.dot(key) / math.sqrt(len(query)) for key in keys])
            mixed.append(sum(weight * value for weight, value in zip(weights, values, strict=True)))
        out.append(w[f"{prefix}.o_proj.weight"] @ torch.cat(mixed))
    return out


def feed_forward(w, prefix, h):
    out = []
    for vector in h:
        gate = w[f"{prefix}.gate_proj.weight"] @ vector
        out.append(w[f"{prefix}.down_proj.weight"] @ (gate / (1 + (-gate).exp()) * (w[f"{prefix}.up_proj.weight"] @ vector)))
    return out


def bare(w, k, h, config):
    """F_k of the normalised vectors h of one sequence."""
    prefix = f"blocks.{k // 2}.{kind(k)}.core"
    if k % 2:
        return feed_forward(w, prefix, h)
    return attention(w, prefix, h, config.n_head, config.n_kv_head, config.norm_eps)


def kind(k):
    return "feed_forward" if k % 2 else "attention"


def sublayer(w, k, x, config, eps=None):
    """F_k(N_k(x)) of Pre-LN for the vectors x of one sequence. ``eps`` is that of N_k, the model's unless given."""
    weight, eps = w[f"blocks.{k // 2}.{kind(k)}.norm.weight"], config.norm_eps if eps is None else eps
    return bare(w, k, [norm(vector, weight, eps) for vector in x], config)


def head(w, x, config, eps=None):
    eps = config.norm_eps if eps is None else eps
    return torch.stack([w["head.weight"] @ norm(vector, w["final_norm.weight"], eps) for vector in x])


def head_of_streams(w, x, config, norm_then_sum):
    """x: per token, a list of streams. The streams are summed and normalised, or each is normalised and then they are summed."""
    if not norm_then_sum:
        return head(w, [sum(streams) for streams in x], config)
    return torch.stack([sum(head(w, streams, config)) for streams in x])
