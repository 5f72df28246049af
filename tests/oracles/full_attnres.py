"""Sources v_0 = embedding, v_{k+1} = F_k(N_k(h_k)); h_k = sum_i a_{k,i} v_i with a_k = softmax_i(w_k . (gamma_k * rms(v_i)))."""

from __future__ import annotations

import torch

from tests.oracles import ops


def logits(w, tokens, config, mix_eps=None, skip=None, rule="reference"):
    """``mix_eps``: of the keys' norm and of every norm that follows a mix, the final one included.

    ``skip``: a block left out. It adds no source; by the reference rule the mix read next is the newest source itself.
    """
    mix_eps = config.norm_eps if mix_eps is None else mix_eps
    return torch.stack([sequence(w, row, config, mix_eps, skip, rule) for row in tokens])


def sequence(w, tokens, config, mix_eps, skip, rule):
    sources = [[w["embedding.weight"][token] for token in tokens]]
    left_out = () if skip is None else (2 * skip, 2 * skip + 1)
    for k in range(2 * config.n_layer + 1):
        if k in left_out:
            continue
        newest_only = k == 0 or (rule == "reference" and k - 1 in left_out)
        h = sources[-1] if newest_only else [mix(w, k, [source[t] for source in sources], mix_eps) for t in range(len(tokens))]
        if k == 2 * config.n_layer:
            return ops.head(w, h, config, mix_eps)
        sources.append(ops.sublayer(w, k, h, config, config.norm_eps if k == 0 else mix_eps))  # k = 0 reads the embedding, no mix


def mix(w, k, sources, eps):
    """Row k - 1 of queries and key norms belongs to the mix that sublayer k reads; k = 2L is the readout."""
    query, weight = w["residual.queries"][k - 1], w["residual.key_norms"][k - 1]
    shares = ops.softmax([query.dot(ops.norm(source, weight, eps)) for source in sources])
    return sum(share * source for share, source in zip(shares, sources, strict=True))
