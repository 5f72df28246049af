"""Usefulness (probe 6 of arXiv 2609.32534): what a block does that an affine map could not.

    W, b = argmin sum over tokens ||x W + b - y||^2 + lambda ||W||^2,    lambda = 1e-3 mean(diag(X'X))
    loss_ratio(l) = loss with block l replaced by x -> x W + b  /  loss

x is the depth state before block l, y after it. Fitted on one half of the windows, measured on the other. A replaced block is a skipped one
(by the default rule: MoDA's writes zero depth slots) whose output is then put in place.

The intercept b is not penalised, so that W and b follow from the centred products; lambda is 1e-3 of the mean diagonal as defined, of
the states as they are. Products are summed in fp64, micro-batch by micro-batch.

Halves: windows in the order of a hash of their tokens, the first half to fit, the odd one included. So their order does not matter.

N tokens of a micro-batch, W width of the depth state, B windows, T time, L blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from hashlib import sha256
from itertools import islice, pairwise
from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from depthbench.errors import UserError
from depthbench.nn.model import LanguageModel
from depthbench.probes._block_map import without_stream
from depthbench.probes.base import MICRO_BATCH, Progress, Rows, looking_at, micro_batches, summed_loss

RIDGE = 1e-3  # lambda, in mean diagonals of X'X
USEFUL_ABOVE = 1.1  # the loss ratio


def usefulness(model: LanguageModel, tokens: Tensor, *, micro_batch: int = MICRO_BATCH, progress: Progress | None = None) -> pd.DataFrame:
    """The loss with block l replaced by its best affine map, over the loss as it is, for every block l; above 1.1 the block is useful.

    ``tokens`` is (windows, T + 1), at least two windows; ``n_tokens`` counts those of the half that is measured.

    Rows: ``loss_ratio`` (i = block) and ``useful_fraction``, over the blocks whose ratio is a number. Not defined for designs whose blocks
    are no map from depth state to depth state (attention residuals), and for those without ``stream`` and ``with_stream``.
    Raises UserError for fewer than two windows and tokens of a wrong shape.
    """
    to_fit, to_measure = _halves(tokens)
    rows, residual = Rows(to_measure[:, 1:].numel()), model.residual
    if why := residual.no_state_map or without_stream(residual):
        rows.not_defined("loss_ratio", why)
        rows.not_defined("useful_fraction", why)
        return rows.frame()
    with looking_at(model) as eager:
        measured = micro_batches(eager, to_measure, micro_batch, None)
        loss = sum(summed_loss(eager, eager.run(eager.embed(inputs_BT)), targets_BT) for inputs_BT, targets_BT in measured)
        replaced = []
        for blocks in _groups(eager, to_fit[:micro_batch]):
            maps = _fit(eager, to_fit, blocks, micro_batch)
            replaced.append(_losses(eager, to_measure, blocks, maps, micro_batch, _part(progress, blocks, model.config.n_layer)))
    fitted, unknowns = to_fit[:, 1:].numel(), 1 + len(maps[0].bias_W)
    note = f"fitted on {fitted} tokens, fewer than the {unknowns} weights of an output" if fitted < unknowns else None
    ratios = (torch.cat(replaced) / loss).tolist()
    for block, ratio in enumerate(ratios):
        rows.add("loss_ratio", ratio, block, note=note)
    numbers = [ratio for ratio in ratios if not math.isnan(ratio)]
    rows.add("useful_fraction", sum(ratio > USEFUL_ABOVE for ratio in numbers) / len(numbers) if numbers else math.nan)
    return rows.frame()


def _halves(tokens: Tensor) -> tuple[Tensor, Tensor]:
    if tokens.ndim != 2 or tokens.shape[0] < 2 or tokens.shape[1] < 2:
        shape = tuple(tokens.shape)
        raise UserError(f"tokens have shape {shape}: usefulness is fitted on half of the windows, (windows, T + 1): give two or more")
    windows = tokens.cpu().long()
    order = sorted(range(len(windows)), key=lambda window: sha256(windows[window].numpy().tobytes()).digest())
    middle = -(-len(order) // 2)
    return tokens[order[:middle]], tokens[order[middle:]]


def _groups(model: LanguageModel, windows: Tensor) -> Iterator[range]:
    """The blocks in turn, at once as many as have room for their sums of products in what L + 2 depth states of these windows take."""
    n_layer, device = model.config.n_layer, model.head.weight.device
    x = model.residual.stream(model.embed(windows[:1, :-1].to(device))).flatten(2)
    room = (n_layer + 2) * len(windows) * x.numel() * x.element_size()
    size = max(1, room // (16 * x.shape[-1] ** 2))
    for first in range(0, n_layer, size):
        yield range(first, min(first + size, n_layer))


def _part(progress: Progress | None, blocks: range, n_layer: int) -> Progress | None:
    """Progress through some of the blocks, as progress through all."""
    return progress and (lambda done: progress((blocks.start + done * len(blocks)) / n_layer))


class AffineMap(NamedTuple):
    weight_WW: Tensor
    bias_W: Tensor

    def __call__(self, stream: Tensor) -> Tensor:
        """The stream (B, T, D) or (B, T, n, D) that the map leaves of one; computed in the map's precision, given in the stream's."""
        x = stream.flatten(2).to(self.weight_WW.dtype)
        return (x @ self.weight_WW + self.bias_W).view_as(stream).to(stream.dtype)


class Products:
    """[1 x]'[1 x y], summed over tokens: all that the fit takes."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.width = width
        self.total = torch.zeros(1 + width, 1 + 2 * width, dtype=torch.float64, device=device)

    def add(self, x_NW: Tensor, y_NW: Tensor) -> None:
        one_x_y = torch.cat((torch.ones_like(x_NW[:, :1]), x_NW, y_NW), 1)
        self.total.addmm_(one_x_y[:, : 1 + self.width].mT, one_x_y)

    def affine_map(self, dtype: torch.dtype) -> AffineMap:
        """The ridge fit; NaN where the states are not finite (hence no check of the factorisation)."""
        first, products = self.total[0] / self.total[0, 0], self.total[1:]
        means, (of_x, of_y) = first[1:].split(self.width), products[:, 1:].split(self.width, 1)
        ridge = (RIDGE * of_x.diagonal().mean()).clamp_min(torch.finfo(of_x.dtype).tiny)  # all states 0: the map is 0
        of_x, of_y = (product - torch.outer(products[:, 0], mean) for product, mean in zip((of_x, of_y), means, strict=True))
        factor, _ = torch.linalg.cholesky_ex(of_x.diagonal_scatter(of_x.diagonal() + ridge))
        weight = torch.cholesky_solve(of_y, factor)
        return AffineMap(weight.to(dtype), (means[1] - means[0] @ weight).to(dtype))


def _fit(model: LanguageModel, tokens: Tensor, blocks: range, micro_batch: int) -> list[AffineMap]:
    """The affine map of each of some neighbouring blocks, from one pass over the windows."""
    products: list[Products] = []
    for inputs_BT, _ in micro_batches(model, tokens, micro_batch, None):
        states = islice(model.boundaries(model.embed(inputs_BT), 0, blocks.stop), blocks.start, None)
        flat = (model.residual.stream(state).flatten(2).flatten(0, 1) for state in states)
        for block, (x_NW, y_NW) in enumerate(pairwise(flat)):
            if block == len(products):
                products.append(Products(x_NW.shape[-1], x_NW.device))
            products[block].add(x_NW.double(), y_NW.double())
    return [of_block.affine_map(torch.promote_types(x_NW.dtype, torch.float32)) for of_block in products]


def _losses(
    model: LanguageModel, tokens: Tensor, blocks: range, maps: list[AffineMap], micro_batch: int, progress: Progress | None
) -> Tensor:
    """The summed loss with each of the blocks replaced by its map, (blocks,); what comes before the block is run once for all."""
    residual, losses = model.residual, 0
    for inputs_BT, targets_BT in micro_batches(model, tokens, micro_batch, progress):
        states = islice(model.boundaries(model.embed(inputs_BT), 0, blocks[-1]), blocks.start, None)
        of_blocks = []
        for block, state, affine in zip(blocks, states, maps, strict=True):
            replaced = residual.with_stream(residual.skip(state, block=block), affine(residual.stream(state)))
            of_blocks.append(summed_loss(model, model.run(replaced, block + 1), targets_BT))
        losses += torch.stack(of_blocks)
    return losses
