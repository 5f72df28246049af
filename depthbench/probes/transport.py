"""Residual transport of designs that mix streams, and depth weights of designs that read sources.

B windows, T time, N tokens, n slots (streams or sources), L blocks. Blocks, boundaries and sublayers count from 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

import pandas as pd
import torch
from torch import Tensor

from depthbench.nn.model import LanguageModel
from depthbench.probes._linear_forms import NotLinear, linear_forms
from depthbench.probes.base import MICRO_BATCH, Progress, Rows, looking_at, micro_batches
from depthbench.residuals.base import LinearForm

DEAD = 0.01  # less than this share, and a running sum counts as not read
CHUNK = 256  # tokens whose products from all boundaries are held at a time: they stay in the cache
TINY = 1e-150  # its square is still above 0 in fp64


def transport(model: LanguageModel, tokens: Tensor, *, micro_batch: int = MICRO_BATCH, progress: Progress | None = None) -> pd.DataFrame:
    """How the state is carried through depth, from the design's linear form, per token and averaged over tokens.

    Where the slots are streams: H(a -> b) = M_{2b-1} ... M_{2a}, the mixes M (n, n) of the sublayers between boundaries a < b, indexed
    [new, old], and its singular values s. Rows by i = a and j = b:

        effective_rank      exp(entropy(s^2 / sum s^2)), between 1 and n
        singular_value_k    s in falling order, k = 1, ..., n
        column_cosine       mean |cosine| over the pairs of columns; 0 for a column of zeros

    Where they are sources, rows ``depth_weight`` by i = slot and j = sublayer (2L: the readout): the share of each slot in what the
    sublayer reads. A running sum is a slot that the sublayer goes on adding to: ``running_weight`` by i = sublayer is its share, and
    ``dead_segment`` how many blocks in a row, from the first, give it less than 0.01 on average over their sublayers that have one.

    ``tokens`` is (windows, T + 1). "not_defined" with one stream and where the design states no linear form. Raises UserError for tokens of
    another shape. Source: arXiv 2609.32534.
    """
    with looking_at(model) as model:
        first = next(micro_batches(model, tokens, 1, None))[0][:, :1]
        batches = (inputs_BT for inputs_BT, _ in micro_batches(model, tokens, micro_batch, progress))
        rows, kind = Rows(tokens[:, 1:].numel()), model.residual.slots
        try:
            slots = next(linear_forms(model, first)).mix.shape[-2]  # once something was written
            if kind == "streams":
                _streams(model, batches, rows)
            elif kind == "sources":
                _sources(model, batches, rows)
            else:
                why = "one stream: nothing is mixed" if slots == 1 else f"its {slots} slots are not said to be streams or sources"
                rows.not_defined("effective_rank", why)
        except NotLinear as reason:
            rows.not_defined("depth_weight" if kind == "sources" else "effective_rank", str(reason))
    return rows.frame()


# Streams --------------------------------------------------------------------------------------------------------------------------


def _streams(model: LanguageModel, batches: Iterable[Tensor], rows: Rows) -> None:
    n_layer, sums = model.config.n_layer, defaultdict(float)  # by b
    for inputs_BT in batches:
        for mixes in _block_mixes(model, inputs_BT).split(CHUNK, 1):
            for b, H in enumerate(composed(mixes), 1):
                sums[b] += measures(H).sum(1)
    n = sums[1].shape[-1] - 2
    metrics = ["effective_rank", *(f"singular_value_{k}" for k in range(1, n + 1)), "column_cosine"]
    for b in range(1, n_layer + 1):
        for a, values in enumerate((sums[b] / rows.n_tokens).tolist()):
            for metric, value in zip(metrics if n > 1 else metrics[:-1], values, strict=False):
                rows.add(metric, value, a, b)
    if n == 1:
        rows.not_defined("column_cosine", "one stream: there are no pairs of columns")


def _block_mixes(model: LanguageModel, inputs_BT: Tensor) -> Tensor:
    """The mix of each block, its feed-forward's after its attention's, (L, N, n, n)."""
    mixes = [form.mix.expand(*inputs_BT.shape, -1, -1).flatten(0, 1) for form in linear_forms(model, inputs_BT) if form.mix is not None]
    return torch.stack([after @ before for before, after in zip(mixes[::2], mixes[1::2], strict=True)])


def composed(mixes_LNnn: Tensor) -> Iterator[Tensor]:
    """For b = 1, ..., L, H(a -> b) for all a < b, (b, N, n, n): the products for b are those for b - 1 mixed once more, and one new."""
    N, n, _ = mixes_LNnn.shape[1:]
    H = mixes_LNnn.new_empty(N, n, 0)  # [token, new, (a, old)]
    for mix in mixes_LNnn:
        H = torch.cat((mix @ H, mix), -1)
        yield H.view(N, n, -1, n).permute(2, 0, 1, 3)


def measures(H: Tensor) -> Tensor:
    """(..., n, n) -> (..., n + 2): effective rank, the n singular values in falling order, mean |cosine| of the columns (n = 1: 0).

    They all follow from the Gram matrix of the columns: its eigenvalues are s^2. So s is exact to 1e-8 of the largest. All are NaN where
    that matrix is not finite.
    """
    columns = H.mT.contiguous()
    gram = columns @ columns.mT
    finite = gram.isfinite().all(-1).all(-1, keepdim=True)
    gram = gram.where(finite.unsqueeze(-1), 0.0)  # else the decomposition fails
    squares = torch.linalg.eigvalsh(gram).clamp_(min=0).flip(-1)
    shares = squares / squares.sum(-1, keepdim=True).clamp(min=TINY)
    rank = -(shares * shares.clamp(min=TINY).log()).sum(-1, keepdim=True)
    i, j = torch.tril_indices(*gram.shape[-2:], -1, device=gram.device)
    lengths = gram.diagonal(dim1=-2, dim2=-1).sqrt().clamp(min=TINY)
    cosines = gram[..., i, j].abs() / (lengths[..., i] * lengths[..., j])
    return torch.cat((rank.exp(), squares.sqrt(), cosines.sum(-1, keepdim=True) / max(len(i), 1)), -1).where(finite, torch.nan)


# Sources --------------------------------------------------------------------------------------------------------------------------


def _sources(model: LanguageModel, batches: Iterable[Tensor], rows: Rows) -> None:
    shares, running = defaultdict(float), defaultdict(float)  # by sublayer
    for inputs_BT in batches:
        for sublayer, form in enumerate(linear_forms(model, inputs_BT)):
            read = form.read.expand(*inputs_BT.shape, -1).sum((0, 1))
            shares[sublayer] += read
            if form.mix is not None and (slots := running_slots(form)).any():
                running[sublayer] += read[slots].sum()
    for sublayer, total in shares.items():
        for slot, share in enumerate((total / rows.n_tokens).tolist()):
            rows.add("depth_weight", share, slot, sublayer)
    if not running:
        for metric in ("running_weight", "dead_segment"):
            rows.not_defined(metric, "there is no running sum: every output is a source of its own")
        return
    running = {sublayer: total.item() / rows.n_tokens for sublayer, total in sorted(running.items())}
    for sublayer, share in running.items():
        rows.add("running_weight", share, sublayer)
    rows.add("dead_segment", dead_segment(running, model.config.n_layer))


def running_slots(form: LinearForm) -> Tensor:
    """Which of the n slots go on into one that the sublayer adds its output to, (n) of bool."""
    return ((form.write.unsqueeze(-1) != 0) & (form.mix != 0)).flatten(0, -2).any(0)


def dead_segment(running: dict[int, float], n_layer: int) -> float:
    """How many blocks, from the first and in a row, give the running sum less than DEAD on average over their sublayers that have one; NaN
    where that hangs on a share that is none."""
    for block in range(n_layer):
        shares = [running[sublayer] for sublayer in (2 * block, 2 * block + 1) if sublayer in running]
        if any(map(math.isnan, shares)):
            return math.nan
        if not shares or sum(shares) / len(shares) >= DEAD:
            return block
    return n_layer
