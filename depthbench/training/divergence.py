"""A loss or a gradient that is no number: training stops before the optimizer step, and where it began is found by running it again.

While training goes well this costs one look at a number per step. Only then are the step's micro-batches run again, without compiled
regions and with the model's taps: first forwards; where every value is finite, backwards, where the first gradient to show it is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import lightning as L
import torch
from torch import Tensor, nn

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


def refuse_weights(trainer: L.Trainer, model: nn.Module) -> None:
    """Raise ``Diverged`` where the last optimizer step left a parameter that is not finite: nothing to go on from."""
    not_finite = [name for name, parameter in model.named_parameters() if not _finite(parameter)]
    if not finite_everywhere(trainer, torch.tensor(float("nan") if not_finite else 0.0, device=trainer.strategy.root_device)):
        place = f"first in parameter {not_finite[0]}" if not_finite else "on another rank"
        raise Diverged(f"the weights after step {trainer.global_step} are not finite", place)


def first_place(model: LanguageModel, batches: Iterable[Tensor], loss: LossOfLogits, *, backward: bool = False) -> str:
    """Where a value that is not finite shows first when the batches, (sequences, T + 1) token ids each, are run again; in words.

    ``backward``: look at gradients too, where all values are finite; the batches are then gone through twice. Parameters and their
    gradients stay as they are.
    """
    try:
        return _search(model, batches, loss, backward)
    except RuntimeError as error:  # above all no memory left: that the run diverged must be said all the same
        return f"where it began is not known, it could not be run again: {(str(error).splitlines() or [type(error).__name__])[0]}"


def _search(model: LanguageModel, batches: Iterable[Tensor], loss: LossOfLogits, backward: bool) -> str:
    if place := _in_a_batch(_forward_place(model, batch, loss) for batch in batches):
        return place
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    if not (backward and gradients) or _finite(nn.utils.get_total_norm([*gradients.values()])):
        return NOT_AGAIN
    not_finite = [name for name, gradient in gradients.items() if not _finite(gradient)]
    if not not_finite:
        return "every gradient is finite, and their norm is too large for a number"
    place = _in_a_batch(_backward_place(model, batch, loss) for batch in batches)
    return place or f"{NOT_AGAIN}; it was in the gradient of parameter {not_finite[0]}"


def _in_a_batch(places: Iterable[str | None]) -> str | None:
    for number, place in enumerate(places, start=1):
        if place:
            return f"first at {place}, in micro-batch {number}" if number > 1 else f"first at {place}"
    return None


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

    def watch(tensor: Tensor, place: str, reader: int | None = None, reads: bool = False) -> Tensor:
        """``reader``: the sublayer that reads the tensor first."""
        if id(tensor) not in watched:
            watched[id(tensor)] = [tensor, place, reader]  # keeps the tensor alive, so that its id stays its own
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: None if _finite(gradient) else places.append(watched[id(tensor)][1]))
        elif reads and watched[id(tensor)][2] == reader:
            watched[id(tensor)][1] = place
        return tensor

    def look(name: str, sublayer: int, value) -> None:
        # What one sublayer wrote and the next one reads is one tensor. It is named as what is read: its gradient comes from there. What
        # still later sublayers read of it is no name for it: were they to blame, something newer would have shown it before.
        reads = name in ("state_in", "branch_in")
        place, reader = f"the gradient of {called(name, sublayer)}", sublayer if reads else sublayer + 1
        map_tensors(lambda tensor: watch(tensor, place, reader, reads), value)

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
