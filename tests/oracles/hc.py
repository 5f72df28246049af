"""n streams H_s per token. h = sum_s A_m[s] H_s; y = F_k(N_k(h)); stream t becomes sum_s A_r[s, t] H_s + B[t] y.

Row s of A_m, A_r and B is computed from stream s alone: scale * tanh(rms(H_s) . W) + static, or static alone.
"""

from __future__ import annotations

import torch

from tests.oracles import ops


def logits(w, tokens, config, streams=4, dynamic=True, norm_then_sum=False, mix_eps=None):
    mix_eps = config.norm_eps if mix_eps is None else mix_eps
    return torch.stack([sequence(w, row, config, streams, dynamic, norm_then_sum, mix_eps) for row in tokens])


def sequence(w, tokens, config, n, dynamic, norm_then_sum, mix_eps):
    x = [[w["embedding.weight"][token] for _ in range(n)] for token in tokens]
    for k in range(2 * config.n_layer):
        matrices = [coefficients(w, f"residual.connections.{k}", H, dynamic, mix_eps) for H in x]
        h = [sum(A_m[s] * H[s] for s in range(n)) for H, (A_m, _, _) in zip(x, matrices, strict=True)]
        terms = ops.sublayer(w, k, h, config)
        for position, (H, (_, A_r, B), y) in enumerate(zip(x, matrices, terms, strict=True)):
            x[position] = [sum(A_r[s][t] * H[s] for s in range(n)) + B[t] * y for t in range(n)]
    return ops.head_of_streams(w, x, config, norm_then_sum)


def coefficients(w, prefix, H, dynamic, mix_eps):
    """A_m[s], A_r[s][t] and B[s] of one token."""
    n = len(H)
    A_m, A_r, B = [], [], []
    for s in range(n):
        static = w[f"{prefix}.static_alpha"][s]
        A_m.append(static[0])
        A_r.append([static[1 + t] for t in range(n)])
        B.append(w[f"{prefix}.static_beta"][s])
        if dynamic:
            matrix, scale_alpha, scale_beta = (w[f"{prefix}.{name}"] for name in ("dynamic", "scale_alpha", "scale_beta"))
            normed = ops.norm(H[s], 1, mix_eps)
            A_m[s] = A_m[s] + scale_alpha * (matrix[0] @ normed).tanh()
            A_r[s] = [A_r[s][t] + scale_alpha * (matrix[1 + t] @ normed).tanh() for t in range(n)]
            B[s] = B[s] + scale_beta * (matrix[n + 1] @ normed).tanh()
    return A_m, A_r, B
