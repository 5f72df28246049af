"""x_{k+1} = x_k + N'_k(F_k(N_k(x_k)))."""

from __future__ import annotations

import torch

from tests.oracles import ops


def logits(w, tokens, config):
    return torch.stack([sequence(w, row, config) for row in tokens])


def sequence(w, tokens, config):
    x = [w["embedding.weight"][token] for token in tokens]
    for k in range(2 * config.n_layer):
        after = w[f"blocks.{k // 2}.{ops.kind(k)}.output_norm.weight"]
        terms = [ops.norm(term, after, config.norm_eps) for term in ops.sublayer(w, k, x, config)]
        x = [vector + term for vector, term in zip(x, terms, strict=True)]
    return ops.head(w, x, config)
