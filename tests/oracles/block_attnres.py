"""Sources b_0 = embedding, b_g = the sum of the outputs of group g's S sublayers. Sublayer k reads a softmax mix of the closed groups' b
and, unless it is the first of its group, of its own group's running sum; the readout reads a mix of all.
"""

from __future__ import annotations

import torch

from tests.oracles import ops


def logits(w, tokens, config, group_size=None, mix_eps=None, skip=None, rule="reference"):
    """``skip``: a block left out.

    ``reference``: neither it nor a group that it would have opened exists, so that the block after it adds to whatever sum is
    running, the embedding included; but where the next to read is the first of a group, or the readout, that one reads the newest
    source alone. ``renormalise``: the groups stay as they are, without the block's terms; one that is empty is no source.
    """
    group_size = 2 * -(-config.n_layer // 8) if group_size is None else group_size
    mix_eps = config.norm_eps if mix_eps is None else mix_eps
    return torch.stack([sequence(w, row, config, group_size, mix_eps, skip, rule) for row in tokens])


def sequence(w, tokens, config, group_size, mix_eps, skip, rule):
    end = 2 * config.n_layer
    left_out = () if skip is None else (2 * skip, 2 * skip + 1)
    opens = [k for k in range(end) if k % group_size == 0 and not (rule == "reference" and k in left_out)]

    groups = [[w["embedding.weight"][token] for token in tokens]]  # the last one is running; None while nothing was added to it
    for k in range(end + 1):
        if k in opens:
            groups.append(None)
        if k in left_out:
            continue
        sources = [group for group in groups if group is not None]
        newest_only = rule == "reference" and k - 1 in left_out and (k == end or k in opens)
        h = sources[-1] if k == 0 or newest_only else [mix(w, k, [b[t] for b in sources], mix_eps) for t in range(len(tokens))]
        if k == end:
            return ops.head(w, h, config, mix_eps)
        terms = ops.sublayer(w, k, h, config, config.norm_eps if k == 0 else mix_eps)  # the embedding that k = 0 reads is no mix
        groups[-1] = terms if groups[-1] is None else [b + term for b, term in zip(groups[-1], terms, strict=True)]


def mix(w, k, sources, eps):
    query, weight = w["residual.queries"][k - 1], w["residual.key_norms"][k - 1]
    shares = ops.softmax([query.dot(ops.norm(source, weight, eps)) for source in sources])
    return sum(share * source for share, source in zip(shares, sources, strict=True))
