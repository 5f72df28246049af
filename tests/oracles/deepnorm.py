"""x_{k+1} = LN_k(alpha x_k + F_k(x_k)), alpha = (2L)^(1/4) with L blocks; LN centred, with gains and without bias."""

from __future__ import annotations

import torch

from tests.oracles import ops


def logits(w, tokens, config):
    return torch.stack([sequence(w, row, config) for row in tokens])


def sequence(w, tokens, config):
    alpha = (2 * config.n_layer) ** 0.25
    x = [w["embedding.weight"][token] for token in tokens]
    for k in range(2 * config.n_layer):
        weight, terms = w[f"residual.norms.{k}.weight"], ops.bare(w, k, x, config)
        x = [ops.layer_norm(alpha * vector + term, weight, config.norm_eps) for vector, term in zip(x, terms, strict=True)]
    return ops.head(w, x, config)
