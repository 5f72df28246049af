"""What probes that start from stored states save over the plain way, which runs the whole model for every row.

    python benchmarks/probes.py [skips swaps jacobian] [--arch pre_ln] [--windows 16]

32 blocks of width 128, windows of 256 tokens. A section does the same work both ways in one process, and prints the ratio of their times
and how far their numbers are apart. The two take turns pass by pass, so that whatever else the machine does hits both: whenever the
probe reports progress, the plain way has a turn.

    skips   causal score and pruning together, against a pass through the whole model for each block left out; and against as many bare
            passes, which give a loss and nothing else
    swaps   permutation score, against a pass through the whole model for each pair; as all cost the same, one in 8 is run
    jacobian
            exact, on two windows, against a pass through the whole model for each row of a block's Jacobian; one block's are run
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise

import torch
from torch import Tensor

from depthbench import build_model
from depthbench.nn.model import LanguageModel
from depthbench.probes.base import MICRO_BATCH, summed_loss
from depthbench.probes.causal import skips
from depthbench.probes.jacobian import jacobian
from depthbench.probes.permutation import permutation

SHAPE = dict(n_layer=32, d_model=128, n_head=4, vocab_size=2048)
LENGTH = 256
ONE_IN = 8  # pairs that the plain way exchanges


class Turns:
    """Work that is done in turn with other work: goes on to the next item at every call, and counts items and seconds."""

    def __init__(self, work: Iterator[None]) -> None:
        self.work, self.items, self.seconds = work, 0, 0.0

    def __call__(self) -> None:
        began = time.perf_counter()
        self.items += next(self.work, self) is not self
        self.seconds += time.perf_counter() - began


def beside(probe: Callable, model: LanguageModel, windows: Tensor, *others: Turns):
    """What the probe gives, and its own seconds while the others had a turn at each of its reports."""
    began = time.perf_counter()
    given = probe(model, windows, progress=lambda done: [other() for other in others])
    return given, time.perf_counter() - began - sum(other.seconds for other in others)


def loss_of(model: LanguageModel, windows: Tensor) -> Tensor:
    return summed_loss(model, model.run(model.embed(windows[:, :-1])), windows[:, 1:])


def bare_passes(model: LanguageModel, windows: Tensor) -> Iterator[None]:
    while True:
        yield loss_of(model, windows[:MICRO_BATCH])


# Causal score and pruning ---------------------------------------------------------------------------------------------------------


def compare_skips(model: LanguageModel, windows: Tensor) -> str:
    n_layer = len(model.blocks)
    steps, changes, losses = (torch.zeros(shape, dtype=torch.float64) for shape in (n_layer, (n_layer, n_layer), n_layer + 1))
    plain, bare = Turns(plain_skips(model, windows, steps, changes, losses)), Turns(bare_passes(model, windows))
    frames, seconds = beside(skips, model, windows, plain, bare)
    scores, deltas = changes / steps, (losses[:-1] - losses[-1]) / windows[:, 1:].numel()
    apart = [abs(row.value - scores[row.i, row.j]) for row in frames["causal"].itertuples() if row.metric == "score"]
    apart += [abs(row.value - deltas[row.i]) for row in frames["pruning"].itertuples() if row.metric == "delta"]
    passes = n_layer * len(windows.split(MICRO_BATCH))
    of_bare = seconds / (bare.seconds / bare.items * passes)
    return f"{seconds:6.1f} s: {seconds / plain.seconds:.3f} of the plain way, {of_bare:.3f} of bare passes; {max(apart):.0e} apart"


def plain_skips(model: LanguageModel, windows: Tensor, steps: Tensor, changes: Tensor, losses: Tensor) -> Iterator[None]:
    """Fills in the sums of the causal score's numerators and denominators, and of the losses; yields after each pass."""
    for batch in windows.split(MICRO_BATCH):
        z = states_of(model, batch, losses, -1)
        for block, (before, after) in enumerate(pairwise(z)):
            steps[block] += (after - before).norm(dim=-1).double().sum()
        yield
        for skipped in range(len(model.blocks)):
            with model.skipped(skipped):
                without = states_of(model, batch, losses, skipped)
            for block in range(skipped + 1, len(model.blocks)):
                change = (without[block + 1] - without[block]) - (z[block + 1] - z[block])
                changes[skipped, block] += change.norm(dim=-1).double().sum()
            yield


def states_of(model: LanguageModel, batch: Tensor, losses: Tensor, row: int) -> list[Tensor]:
    """The depth states of a whole pass, whose loss is added to a row of ``losses``."""
    z = []
    for boundary, state in enumerate(model.boundaries(model.embed(batch[:, :-1]))):
        z.append(model.residual.depth_state(state, block=boundary))
    losses[row] += summed_loss(model, state, batch[:, 1:])
    return z


# Permutation score ----------------------------------------------------------------------------------------------------------------


def compare_swaps(model: LanguageModel, windows: Tensor) -> str:
    pairs = list(combinations(range(len(model.blocks)), 2))
    losses = torch.zeros(len(pairs), dtype=torch.float64)
    plain = Turns(plain_swaps(model, windows, pairs, losses))
    frame, seconds = beside(permutation, model, windows, plain)
    (loss,) = frame.value[frame.metric == "loss"] * windows[:, 1:].numel()
    scores = (losses - loss).abs() / loss
    found = {(row.i, row.j): row.value for row in frame.itertuples() if row.metric == "score"}
    apart = [abs(found[pair] - score) for pair, score in zip(pairs[::ONE_IN], scores[::ONE_IN], strict=True)]
    return f"{seconds:6.1f} s: {seconds / (ONE_IN * plain.seconds):.3f} of the plain way; {max(apart):.0e} apart"


def plain_swaps(model: LanguageModel, windows: Tensor, pairs: list[tuple[int, int]], losses: Tensor) -> Iterator[None]:
    """Adds up the losses of one pair in 8; yields for every pair."""
    for batch in windows.split(MICRO_BATCH):
        for pair, (first, second) in enumerate(pairs):
            if pair % ONE_IN == 0:
                with model.swapped(first, second):
                    losses[pair] += loss_of(model, batch)
            yield


# Jacobian deviation ---------------------------------------------------------------------------------------------------------------


def compare_jacobian(model: LanguageModel, windows: Tensor) -> str:
    n_layer, width = len(model.blocks), model.config.d_model
    J = torch.zeros(width, width, dtype=torch.float64)
    plain = Turns(plain_jacobian(model, windows[:2], n_layer // 2, J))
    frame, seconds = beside(jacobian, model, windows[:2], plain)
    apart = abs(frame.value[n_layer // 2] - (J - torch.eye(width)).norm() / width**0.5)
    return f"{seconds:6.1f} s: {seconds / (n_layer * plain.seconds):.3f} of the plain way; {apart:.0e} apart"


def plain_jacobian(model: LanguageModel, windows: Tensor, block: int, J: Tensor) -> Iterator[None]:
    """Fills in a block's Jacobian; yields as often as there are blocks."""
    residual = model.residual
    for rows in torch.arange(len(J)).chunk(len(model.blocks)):
        for row in rows:
            before = model.run(model.embed(windows[:, :-1]), 0, block)
            with torch.enable_grad():
                x = residual.stream(before).detach().requires_grad_()
                after = model.run(residual.with_stream(before, x), block, block + 1)
                model.logits(model.run(after, block + 1))
                (pulled,) = torch.autograd.grad(residual.stream(after)[..., row].sum(), x)
            J[row] = pulled.flatten(0, -2).double().mean(0)
        yield


SECTIONS = {"skips": compare_skips, "swaps": compare_swaps, "jacobian": compare_jacobian}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), metavar="section", help=f"of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--arch", default="pre_ln")
    parser.add_argument("--windows", type=int, default=16)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = build_model(args.arch, **SHAPE)
    windows = torch.randint(SHAPE["vocab_size"], (args.windows, LENGTH + 1))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.arch}, {args.windows} windows of {LENGTH} tokens")
    with torch.no_grad():
        loss_of(model, windows[:MICRO_BATCH])  # the first pass warms up
    for section in args.sections:
        print(f"{section:8s}{SECTIONS[section](model, windows)}", flush=True)


if __name__ == "__main__":
    main()
