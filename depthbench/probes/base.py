"""What all probes share: how a model is held while it is looked at, windows of tokens, and the rows a probe gives.

A probe is a function ``probe(model, tokens, *, micro_batch=…, progress=None) -> DataFrame``. ``tokens`` is (windows, T + 1): the model
reads the first T of a window and is scored on the last T. Rows have the columns of the store's ``probes`` table that a probe
decides: ``metric``, ``i`` and ``j`` (None where it has one index, or none), ``value``, ``n_tokens``, ``rule``, ``status``, ``note``.
Definitions and thresholds are those of arXiv 2609.32534.

B windows at a time, T time, V vocabulary, L blocks; blocks count from 0, boundaries from 0 (the embedding) to L.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F

from depthbench.errors import UserError
from depthbench.nn.model import LanguageModel
from depthbench.residuals.base import State

MICRO_BATCH = 8  # windows in one forward pass
Progress = Callable[[float], None]  # is told the fraction that is done, from 0 to 1


@contextmanager
def looking_at(model: LanguageModel, *, gradients: bool = False) -> Iterator[LanguageModel]:
    """The model as probes look at it: eager, in eval mode, without gradients unless asked for. Its mode and all random state are put back
    whatever happens inside."""
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({parameter.device.index for parameter in model.parameters() if parameter.is_cuda})
    with torch.random.fork_rng(devices), torch.set_grad_enabled(gradients):
        model.eval()
        try:
            yield model.eager()
        finally:
            for module, mode in modes:
                module.training = mode


def micro_batches(model: LanguageModel, tokens: Tensor, micro_batch: int, progress: Progress | None) -> Iterator[tuple[Tensor, Tensor]]:
    """(inputs, targets), each (B, T) on the model's device, for at most ``micro_batch`` windows at a time; reports progress after each."""
    if tokens.ndim != 2 or tokens.shape[0] < 1 or tokens.shape[1] < 2:
        raise UserError(f"tokens have shape {tuple(tokens.shape)}: a probe takes (windows, T + 1), at least one window of two tokens")
    if micro_batch < 1:
        raise UserError(f"micro_batch is {micro_batch}: give a whole number of at least 1")
    device, done = model.head.weight.device, 0
    for windows in tokens.to(device).split(micro_batch):
        yield windows[:, :-1], windows[:, 1:]
        done += len(windows)
        if progress:
            progress(done / len(tokens))


def summed_loss(model: LanguageModel, state: State, targets_BT: Tensor) -> Tensor:
    """Cross entropy in nats, summed over all tokens, as a 0-dim fp64 tensor, from the state after the last block."""
    logits_BTV = model.logits(state)
    logits_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none").double().sum()


def late_from(n_layer: int) -> int:
    """The first index that counts as late: index >= L / 4."""
    return -(-n_layer // 4)


class Rows:
    """Collects a probe's rows. ``n_tokens`` and ``rule`` are the same in all of them."""

    COLUMNS = ("metric", "i", "j", "value", "n_tokens", "rule", "status", "note")

    def __init__(self, n_tokens: int, rule: str | None = None) -> None:
        self.n_tokens, self.rule = n_tokens, rule
        self._rows: list[dict] = []

    def add(self, metric: str, value: float, i: int | None = None, j: int | None = None, note: str | None = None) -> None:
        self._rows.append({"metric": metric, "i": i, "j": j, "value": float(value), "status": "ok", "note": note})

    def not_defined(self, metric: str, why: str) -> None:
        """The one row that says that a metric has no meaning for this design."""
        self._rows.append({"metric": metric, "i": None, "j": None, "value": None, "status": "not_defined", "note": why})

    def frame(self) -> pd.DataFrame:
        frame = pd.DataFrame(self._rows, columns=[name for name in self.COLUMNS if name not in ("n_tokens", "rule")])
        frame = frame.assign(n_tokens=self.n_tokens, rule=self.rule)[list(self.COLUMNS)]
        return frame.astype({"i": "Int64", "j": "Int64", "value": "float64"})
