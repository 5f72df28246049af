"""Jacobian deviation (probe 7 of arXiv 2609.32534): how far a block is from passing its input on.

    J_l = mean over positions p of d(sum over positions of y) / d x_p,    deviation(l) = ||J_l - I||_F / sqrt(D)

x is what the design calls the block's ``stream`` before it, y after it; all else in the state is held fixed. Causality lets y at later
positions depend on x_p: that is why y is summed. With several streams per token they count as positions.

A row v^T J is one vector-Jacobian product: v as the gradient on y at every position, then the mean over positions of the gradient on x.
Exactly, v takes the D unit vectors. Estimated (Hutchinson), v has independent signs, and E ||v^T (J - I)||^2 = ||J - I||_F^2.

All rows are pulled through one graph of one block, which starts at the cached state before it. They come one after the other: a
micro-batch of tokens keeps the machine as busy as a batch of rows would, and asks nothing of a design but that its graph can be walked
again.

B batch, T time, D width, L blocks, R directions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pandas as pd
import torch
from torch import Tensor

from depthbench.errors import UserError, unknown
from depthbench.nn.model import LanguageModel
from depthbench.probes._block_map import without_stream
from depthbench.probes.base import MICRO_BATCH, Progress, Rows, looking_at, micro_batches
from depthbench.residuals.base import State

EXACT_UP_TO = 512  # the width
SAMPLES = 64
METHODS = ("exact", "hutchinson")


@torch.inference_mode(False)  # where it is on, no graph is made
def jacobian(
    model: LanguageModel,
    tokens: Tensor,
    *,
    method: str | None = None,
    samples: int = SAMPLES,
    micro_batch: int = MICRO_BATCH,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """||J_l - I||_F / sqrt(D) of every block l: 0 for the identity, 1 for a block that forgets its input.

    ``method`` is "exact" (D backward passes through each block), "hutchinson" (``samples`` of them), or None: exact up to a width of 512.
    ``tokens`` is (windows, T + 1); the time is proportional to the number of windows, of which an average over positions needs few.

    Rows: ``deviation`` (i = block) and, where estimated, ``stderr`` (i), its standard error over the samples. Not defined for a design
    without ``stream`` and ``with_stream``. Gradients are taken on the block's input alone: parameters and their ``grad`` stay as they were.
    Raises UserError for an unknown method, fewer than two samples and tokens of a wrong shape.
    """
    if method is not None and method not in METHODS:
        raise unknown("method", method, METHODS)
    if samples < 2:
        raise UserError(f"samples is {samples}: a standard error takes at least 2")
    rows = Rows(tokens[..., 1:].numel())
    if why := without_stream(model.residual):
        rows.not_defined("deviation", why)
        return rows.frame()
    exact = method == "exact" or (method is None and model.config.d_model <= EXACT_UP_TO)
    directions_LRD = _unit_vectors(model) if exact else _signs(model, samples)
    squares_LR = (_products(model, tokens, directions_LRD, micro_batch, progress) - directions_LRD).square().sum(-1)
    estimates_LR = squares_LR / model.config.d_model * (squares_LR.shape[1] if exact else 1)
    for block, estimates in enumerate(estimates_LR.cpu()):
        deviation = estimates.mean().sqrt()
        rows.add("deviation", deviation, block)
        if not exact:  # of a root: the error of what is under it over twice the root
            error = estimates.std() / samples**0.5 / (2 * deviation) if deviation else deviation
            rows.add("stderr", error, block, note=f"over {samples} random directions")
    return rows.frame()


def _unit_vectors(model: LanguageModel) -> Tensor:
    width = model.config.d_model
    return torch.eye(width, dtype=torch.float64, device=model.head.weight.device).expand(model.config.n_layer, -1, -1)


def _signs(model: LanguageModel, samples: int) -> Tensor:
    """Directions of their own for every block, the same at every call."""
    shape, generator = (model.config.n_layer, samples, model.config.d_model), torch.Generator().manual_seed(0)
    return (torch.randint(2, shape, generator=generator) * 2 - 1).to(model.head.weight.device, torch.float64)


def _products(model: LanguageModel, tokens: Tensor, directions_LRD: Tensor, micro_batch: int, progress: Progress | None) -> Tensor:
    """v^T J_l for every direction v of block l, (L, R, D)."""
    n_layer, done = model.config.n_layer, 0
    summed_LRD = directions_LRD.new_zeros(directions_LRD.shape)
    positions_L11 = summed_LRD.new_zeros(n_layer, 1, 1)
    with looking_at(model) as eager, _frozen(eager):
        for inputs_BT, _ in micro_batches(eager, tokens, micro_batch, None):
            for block, state in enumerate(eager.boundaries(eager.embed(inputs_BT), 0, n_layer - 1)):
                positions_L11[block] += _pull(eager, state, block, directions_LRD[block], onto=summed_LRD[block])
                done += len(inputs_BT)
                if progress:
                    progress(done / (len(tokens) * n_layer))
    return summed_LRD / positions_L11


def _pull(model: LanguageModel, state: State, block: int, directions_RD: Tensor, *, onto: Tensor) -> int:
    """Adds v^T d(sum of y)/dx, summed over the positions of x, to the rows of ``onto`` (R, D), one per v; gives the number of positions."""
    residual = model.residual
    with torch.enable_grad():
        x = residual.stream(state).detach().requires_grad_()
        y = residual.stream(model.run(residual.with_stream(state, x), block, block + 1))
    if y.requires_grad:  # else x is not read, and its gradient is 0
        for direction_D, row_D in zip(directions_RD.to(y.dtype), onto, strict=True):
            pulled = torch.autograd.grad(y, x, direction_D.expand_as(y), retain_graph=True)[0]
            row_D += pulled.flatten(0, -2).sum(0, dtype=onto.dtype)
    return x[..., 0].numel()


@contextmanager
def _frozen(model: LanguageModel) -> Iterator[None]:
    """Keeps parameters out of every graph made inside."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in learning:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
