"""x_{k+1} = x_k + F_k(N_k(x_k) / sqrt(l)), l the block of sublayer k, counted from 1."""

from __future__ import annotations

import math

import torch

from tests.oracles import ops


def logits(w, tokens, config):
    return torch.stack([sequence(w, row, config) for row in tokens])


def sequence(w, tokens, config):
    x = [w["embedding.weight"][token] for token in tokens]
    for k in range(2 * config.n_layer):
        weight, layer = w[f"blocks.{k // 2}.{ops.kind(k)}.norm.weight"], k // 2 + 1
        scaled = [ops.norm(vector, weight, config.norm_eps) / math.sqrt(layer) for vector in x]
        x = [vector + term for vector, term in zip(x, ops.bare(w, k, scaled, config), strict=True)]
    return ops.head(w, x, config)
