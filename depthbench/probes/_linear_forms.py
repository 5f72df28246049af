"""The walk through a model as its design's linear form describes it: what path weights and transport are made from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from depthbench.nn.model import LanguageModel
from depthbench.residuals.base import LinearForm, State


class NotLinear(Exception):
    """The design states no linear form; the message says so, for the store."""


def linear_forms(model: LanguageModel, inputs_BT: Tensor) -> Iterator[LinearForm]:
    """The linear form of every sublayer and, last, of the readout, 2L + 1 in all and in fp64, while the model runs on token ids (B, T).

    The states of one block are held at a time. Raises NotLinear where the design gives no form for a step.
    """
    walk = model.boundaries(model.embed(inputs_BT))
    state = next(walk)
    for block in range(model.config.n_layer):
        seen: dict[tuple[str, int], Any] = {}
        with model.taps(lambda name, sublayer, value, seen=seen: seen.__setitem__((name, sublayer), value)):
            state = next(walk)
        for sublayer in (2 * block, 2 * block + 1):
            yield _form(model, seen["state_in", sublayer], sublayer, seen["branch_out", sublayer])
    yield _form(model, state, model.config.n_sublayer, None)


def _form(model: LanguageModel, state: State, sublayer: int, branch_out: Tensor | None) -> LinearForm:
    form = model.residual.linear(state, sublayer=sublayer, branch_out=branch_out)
    if form is None:
        step = "the readout" if sublayer == model.config.n_sublayer else f"sublayer {sublayer}"
        raise NotLinear(f"the design states no linear form (its linear gives None for {step})")
    return LinearForm(*(None if coefficients is None else coefficients.double() for coefficients in form))
