"""Pre-LN whose attention also attends, in the same softmax, to what earlier sublayers wrote at the same token."""

from __future__ import annotations

import torch

from tests.oracles import ops


def logits(w, tokens, config, rotate_depth_keys=False, skip=None, rule="zeros"):
    """``skip``: a block left out. By the rule ``zeros`` its two slots are zeros that take part in every later softmax."""
    return torch.stack([sequence(w, row, config, rotate_depth_keys, skip, rule) for row in tokens])


def sequence(w, tokens, config, rotate, skip, rule):
    x = [w["embedding.weight"][token] for token in tokens]
    depth = [[] for _ in tokens]  # per token: (keys, values), one vector per key/value head
    zeros = [torch.zeros(config.d_model // config.n_head, dtype=x[0].dtype)] * config.n_kv_head
    for b in range(config.n_layer):
        if b == skip:
            for written in depth:
                written.extend([(zeros, zeros)] * 2 if rule == "zeros" else [])
            continue
        x = block(w, b, x, depth, config, rotate)
    return ops.head(w, x, config)


def block(w, b, x, depth, config, rotate):
    def write(t, keys, values):
        depth[t].append(([ops.rotated(key, t) for key in keys] if rotate else keys, values))

    eps, prefix = config.norm_eps, f"blocks.{b}.attention"
    h = [ops.norm(vector, w[f"{prefix}.norm.weight"], eps) for vector in x]
    terms = ops.attention(w, f"{prefix}.core", h, config.n_head, config.n_kv_head, eps, depth)
    for t, vector in enumerate(h):
        write(t, *ops.keys_and_values(w, f"{prefix}.core", vector, config.n_kv_head, eps))
    x = [vector + term for vector, term in zip(x, terms, strict=True)]

    prefix = f"blocks.{b}.feed_forward"
    h = [ops.norm(vector, w[f"{prefix}.norm.weight"], eps) for vector in x]
    if b < config.n_layer - 1:
        for t, vector in enumerate(h):
            keys = ops.heads(w[f"{prefix}.core.depth_k_proj.weight"] @ vector, config.n_kv_head)
            if f"blocks.{b}.attention.core.k_norm.weight" in w:
                keys = [ops.norm(key, w[f"blocks.{b}.attention.core.k_norm.weight"], eps) for key in keys]
            write(t, keys, ops.heads(w[f"{prefix}.core.depth_v_proj.weight"] @ vector, config.n_kv_head))
    return [vector + term for vector, term in zip(x, ops.feed_forward(w, f"{prefix}.core", h), strict=True)]
