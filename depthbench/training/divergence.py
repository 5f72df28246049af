"""A loss or a gradient that is no number: training stops before the optimizer step, and where it began is found by running it again.

While training goes well this costs one look at a number per step. Only then are the step's micro-batches run again, without compiled
regions and with the model's taps: first forwards; where every value is finite, backwards, where the first gradient to show it is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import lightning as L
import torch
from torch import Tensor

from depthbench.nn.model import LanguageModel
from depthbench.residuals.base import map_tensors

LossOfLogits = Callable[[Tensor, Tensor], Tensor]  # of the logits and the batch that they are of
NOT_AGAIN = "it did not show again when the step was repeated"


class Diverged(Exception):
    """Training met a value that is not finite: ``what`` it is, and the ``place`` where it shows first."""

    def __init__(self, what: str, place: str):
        super().__init__(f"{what}: {place}")
        self.what, self.place = what, place


def finite_everywhere(trainer: L.Trainer, value: Tensor) -> bool:
    """Whether ``value`` is finite on every rank; all ranks get the same answer."""
    finite = bool(torch.isfinite(value))
    return trainer.strategy.reduce_boolean_decision(finite, all=True) if trainer.world_size > 1 else finite


def first_place(model: LanguageModel, batches: Iterable[Tensor], loss: LossOfLogits, *, backward: bool = False) -> str:
    """Where a value that is not finite shows first when the batches, (sequences, T + 1) token ids each, are run again; in words.

    ``backward``: look at gradients too. Parameters and their gradients stay as they are.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if backward and gradients and all(torch.isfinite(gradient).all() for gradient in gradients):
        return "every gradient is finite, and their norm is too large for a number"
    for number, batch in enumerate(batches, start=1):
        place = _forward_place(model, batch, loss) or (backward and _backward_place(model, batch, loss))
        if place:
            return f"first at {place}, in micro-batch {number}" if number > 1 else f"first at {place}"
    return NOT_AGAIN


@torch.no_grad()
def _forward_place(model: LanguageModel, batch: Tensor, loss: LossOfLogits) -> str | None:
    places = []

    def look(name: str, sublayer: int, value) -> None:
        if not places and not _finite(value):
            places.append("the embedding" if (name, sublayer) == ("state_in", 0) else called(name, sublayer))

    with model.taps(look):
        logits = model(batch[:, :-1])
    if not places and not _finite(logits):
        places.append("the logits")
    if not places and not _finite(loss(logits, batch)):
        places.append("the loss of finite logits")
    return places[0] if places else None


@torch.enable_grad()
def _backward_place(model: LanguageModel, batch: Tensor, loss: LossOfLogits) -> str | None:
    """The first gradient that is not finite in the order of the backward pass, at a tap or else at a parameter."""
    places, watched = [], {}

    def watch(tensor: Tensor, place: str, instead: bool = False) -> Tensor:
        if id(tensor) not in watched:
            watched[id(tensor)] = [tensor, place]  # keeps the tensor alive, so that its id stays its own
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: None if _finite(gradient) else places.append(watched[id(tensor)][1]))
        elif instead:
            watched[id(tensor)][1] = place
        return tensor

    def look(name: str, sublayer: int, value) -> None:
        place = f"the gradient of {called(name, sublayer)}"
        # Where a design's branch reads the state as it is, what it passes back is named as the branch's: the other way out of the same
        # tensor leads to later taps, which have been seen before.
        map_tensors(lambda tensor: watch(tensor, place, instead=name == "branch_in"), value)

    with model.taps(look):
        logits = watch(model(batch[:, :-1]), "the gradient of the logits")
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(loss(logits, batch), list(named.values()), allow_unused=True)
    places += [
        f"the gradient of parameter {name}"
        for name, gradient in zip(named, gradients, strict=True)
        if gradient is not None and not _finite(gradient)
    ]
    return places[0] if places else None


def called(name: str, sublayer: int) -> str:
    """A tap in words: its name, and its block and the sublayer of it."""
    block, feed_forward = divmod(sublayer, 2)
    return f"{name} of block {block} ({('attention', 'feed-forward')[feed_forward]})"


def _finite(value) -> bool:
    seen = []
    map_tensors(lambda tensor: seen.append(torch.isfinite(tensor).all()) or tensor, value)
    return all(bool(finite) for finite in seen)
