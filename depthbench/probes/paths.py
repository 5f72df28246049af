"""Residual path weights: how much of the embedding and of every earlier sublayer's output a sublayer reads.

B windows, T time, n slots of the state, I sources so far; L blocks. Sublayers count from 0, 2L is the readout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from depthbench.nn.model import LanguageModel
from depthbench.probes._linear_forms import NotLinear, linear_forms
from depthbench.probes.base import MICRO_BATCH, Progress, Rows, looking_at, micro_batches


def paths(model: LanguageModel, tokens: Tensor, *, micro_batch: int = MICRO_BATCH, progress: Progress | None = None) -> pd.DataFrame:
    """W(i, l), the weight of source i in the input that sublayer l reads, averaged over tokens:

        branch_in_l = sum_i W(i, l) f_i,    f_0 the embedding, f_i the output of sublayer i - 1 as it is added

    for sublayers l = 0, ..., 2L (2L: what the final norm gets) and the sources i = 0, ..., l that exist by then. The weights compose what
    the design's ``linear`` says of each step: with read a_l, mix M_l and write b_l, W(i, l) = a_l M_{l-1} ... M_i b_{i-1}, and
    a_l M_{l-1} ... M_0 1 for the embedding, per token. Norms after the addition are factors, alpha_k s_k kept together: a product of the
    alphas alone overflows.

    ``tokens`` is (windows, T + 1). Rows: ``weight`` by i (source) and j (sublayer), without unit; "not_defined" where the design states no
    linear form. What that form cannot hold, as the gains per channel of a norm, is said in ``note``. Raises UserError for tokens of
    another shape. Source: arXiv 2609.32534.
    """
    count = model.config.n_sublayer + 1
    sums = torch.zeros(count, count, dtype=torch.float64, device=model.head.weight.device)
    why = None
    with looking_at(model) as model:
        try:
            for inputs_BT, _ in micro_batches(model, tokens, micro_batch, progress):
                for sublayer, of_sublayer in enumerate(source_paths(model, inputs_BT)):
                    sums[: sublayer + 1, sublayer] += of_sublayer.summed(inputs_BT.numel())
        except NotLinear as reason:
            why = str(reason)
    rows = Rows(tokens[:, 1:].numel())
    if why:
        rows.not_defined("weight", why)
        return rows.frame()
    note = model.residual.linear_note() or None
    for sublayer, of_sublayer in enumerate((sums / rows.n_tokens).T.tolist()):
        for source, weight in enumerate(of_sublayer[: sublayer + 1]):
            rows.add("weight", weight, source, sublayer, note)
    return rows.frame()


class SourcePaths(NamedTuple):
    """How a sublayer reads the slots, and how much of each source the slots hold by then; sizes of 1 for B and T broadcast."""

    read: Tensor  # (B, T, n)
    held: Tensor  # (B, T, n, I)

    def per_token(self) -> Tensor:
        """W, (B, T, I)."""
        return torch.einsum("btn,btni->bti", self.read, self.held)

    def summed(self, n_tokens: int) -> Tensor:
        """The sum of W over ``n_tokens`` tokens, (I): what does not depend on the token is not repeated for each."""
        distinct = torch.broadcast_shapes(self.read.shape[:2], self.held.shape[:2]).numel()
        return torch.einsum("btn,btni->i", self.read, self.held) * (n_tokens / distinct)


def source_paths(model: LanguageModel, inputs_BT: Tensor) -> Iterator[SourcePaths]:
    """The paths into every sublayer and, last, into the readout, while the model runs on token ids (B, T). Raises NotLinear."""
    held = None
    for form in linear_forms(model, inputs_BT):
        if held is None:  # at the start every slot is the embedding
            held = form.read.new_ones(1, 1, form.read.shape[-1], 1)
        yield SourcePaths(form.read, held)
        if form.mix is not None:
            held = _joined(form.mix @ held, form.write.unsqueeze(-1))


def _joined(mixed: Tensor, written: Tensor) -> Tensor:
    tokens = torch.broadcast_shapes(mixed.shape[:2], written.shape[:2])
    return torch.cat([part.expand(*tokens, -1, -1) for part in (mixed, written)], -1)
