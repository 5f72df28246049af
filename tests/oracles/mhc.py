"""n streams x_s per token, concatenated v. h = sum_s H_pre[s] x_s; y = F_k(N_k(h)); stream t becomes sum_s H_res[t, s] x_s + H_post[t] y.

H_pre = sigmoid(u_pre), H_post = 2 sigmoid(u_post), H_res = Sinkhorn(u_res), each u = alpha * (phi rms(v)) + bias.
"""

from __future__ import annotations

import torch

from tests.oracles import ops


def logits(w, tokens, config, streams=4, iterations=20, norm_then_sum=False, mix_eps=None):
    mix_eps = config.norm_eps if mix_eps is None else mix_eps
    return torch.stack([sequence(w, row, config, streams, iterations, norm_then_sum, mix_eps) for row in tokens])


def sequence(w, tokens, config, n, iterations, norm_then_sum, mix_eps):
    x = [[w["embedding.weight"][token] for _ in range(n)] for token in tokens]
    for k in range(2 * config.n_layer):
        matrices = [coefficients(w, f"residual.connections.{k}", streams, iterations, mix_eps) for streams in x]
        h = [sum(H_pre[s] * streams[s] for s in range(n)) for streams, (H_pre, _, _) in zip(x, matrices, strict=True)]
        terms = ops.sublayer(w, k, h, config)
        for position, (streams, (_, H_post, H_res), y) in enumerate(zip(x, matrices, terms, strict=True)):
            x[position] = [sum(H_res[t][s] * streams[s] for s in range(n)) + H_post[t] * y for t in range(n)]
    return ops.head_of_streams(w, x, config, norm_then_sum)


def coefficients(w, prefix, streams, iterations, mix_eps):
    """H_pre[s], H_post[t] and H_res[t][s] of one token."""
    n = len(streams)
    phi, bias, alpha = (w[f"{prefix}.{name}"] for name in ("phi", "bias", "alpha"))
    normed = ops.norm(torch.cat(streams), 1, mix_eps)
    pre = [alpha[0] * (phi[s] @ normed) + bias[s] for s in range(n)]
    post = [alpha[1] * (phi[n + t] @ normed) + bias[n + t] for t in range(n)]
    res = [[alpha[2] * (phi[2 * n + t * n + s] @ normed) + bias[2 * n + t * n + s] for s in range(n)] for t in range(n)]
    H_pre = [1 / (1 + (-u).exp()) for u in pre]
    H_post = [2 / (1 + (-u).exp()) for u in post]
    return H_pre, H_post, sinkhorn([torch.stack(row).exp() for row in res], iterations)


def sinkhorn(rows, iterations):
    """rows[t][s] of positive numbers: columns (over t) made to sum to 1, then rows (over s), time and again."""
    for _ in range(iterations):
        column_sums = sum(rows)
        rows = [row / column_sums for row in rows]
        rows = [row / row.sum() for row in rows]
    return rows
