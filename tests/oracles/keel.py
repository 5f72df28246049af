"""x_{k+1} = N'_k(alpha x_k + F_k(N_k(x_k))), alpha the number of sublayers. In the first block alpha is 1, and its attention has no N'."""

from __future__ import annotations

import torch

from tests.oracles import ops


def logits(w, tokens, config, alpha=None):
    alpha = 2 * config.n_layer if alpha is None else alpha
    return torch.stack([sequence(w, row, config, alpha) for row in tokens])


def sequence(w, tokens, config, alpha):
    x = [w["embedding.weight"][token] for token in tokens]
    for k in range(2 * config.n_layer):
        factor = 1 if k < 2 else alpha
        x = [factor * vector + term for vector, term in zip(x, ops.sublayer(w, k, x, config), strict=True)]
        if k >= 1:
            x = [ops.norm(vector, w[f"residual.outer_norms.{k}.weight"], config.norm_eps) for vector in x]
    return ops.head(w, x, config)
