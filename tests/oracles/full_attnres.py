"""Sources v_0 = embedding, v_{k+1} = F_k(N_k(h_k)); h_k = sum_i a_{k,i} v_i with a_k = softmax_i(w_k . (gamma_k * rms(v_i)))."""

from __future__ import annotations

import torch

from tests.oracles import ops


def logits(w, tokens, config, skip=None, rule="reference"):
    """``skip``: a block left out. It adds no source; by the reference rule the mix read next is the newest source itself."""
    return torch.stack([sequence(w, row, config, skip, rule) for row in tokens])


def sequence(w, tokens, config, skip, rule):
    sources = [[w["embedding.weight"][token] for token in tokens]]
    left_out = () if skip is None else (2 * skip, 2 * skip + 1)
    for k in range(2 * config.n_layer + 1):
        if k in left_out:
            continue
        newest_only = k == 0 or (rule == "reference" and k - 1 in left_out)
        h = sources[-1] if newest_only else [mix(w, k, [source[t] for source in sources], config) for t in range(len(tokens))]
        if k == 2 * config.n_layer:
            return ops.head(w, h, config)
        sources.append(ops.sublayer(w, k, h, config))


def mix(w, k, sources, config):
    query, weight = w[f"residual.mixes.{k}.query"], w[f"residual.mixes.{k}.weight"]
    shares = ops.softmax([query.dot(ops.norm(source, weight, config.norm_eps)) for source in sources])
    return sum(share * source for share, source in zip(shares, sources, strict=True))
