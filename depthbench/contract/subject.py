"""What a check looks at, and how it says what it found.

B batch, T time, D width, V vocabulary, L blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor

from depthbench import residuals
from depthbench.nn.config import ModelConfig
from depthbench.nn.model import LanguageModel, build_model
from depthbench.residuals.base import Residual, State, map_tensors

SHAPE = dict(n_layer=3, d_model=16, n_head=4, n_kv_head=2, vocab_size=29, d_ff=24)
EXACT = 1e-12  # of an identity, in fp64


class ContractError(AssertionError):
    """A design breaks the contract. The message says what is wrong in one or two lines, with numbers."""


class NotDefined(Exception):
    """A check that does not apply to this design; the message says why."""


class Subject:
    """A design and its options, under check: builds the small models that the checks look at, always the same ones."""

    def __init__(self, design: str | type[Residual], options: Mapping[str, Any]) -> None:
        self.design = residuals.get(design)
        self.options = dict(options)

    def fresh(self, *, seed: int = 3, **changes: Any) -> LanguageModel:
        """A model in fp32 as it is born; ``changes`` to the shape."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build_model(self.design, **SHAPE | changes, **self.options)

    def moved(self, *, spread: float = 0.3, **changes: Any) -> LanguageModel:
        """A model in fp64 none of whose parameters has its initial value."""
        return move(self.fresh(**changes).double(), spread)

    def plain(self, **changes: Any) -> LanguageModel:
        """Pre-LN at the same shape and seed."""
        return Subject("pre_ln", {}).fresh(**changes)

    def config(self, **changes: Any) -> ModelConfig:
        return ModelConfig(**SHAPE | changes)


def check(function: Callable[[Subject], None]) -> Callable[..., None]:
    """Makes a function of a Subject one of a design and its options."""

    @wraps(function)
    def of_design(design: str | type[Residual], /, **options: Any) -> None:
        function(Subject(design, options))

    of_design.on_subject = function
    return of_design


def fail(message: str) -> NoReturn:
    raise ContractError(message)


def require(holds: Any, message: str) -> None:
    if not holds:
        fail(message)


@torch.no_grad()
def move(model: LanguageModel, spread: float) -> LanguageModel:
    """Adds noise of standard deviation ``spread`` to every parameter, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=spread)
    return model


def some_tokens(batch: int = 2, length: int = 6, seed: int = 1) -> Tensor:
    return torch.randint(SHAPE["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


def deviation(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, over the largest expected value or 1."""
    if actual.shape != expected.shape:
        fail(f"shapes differ: {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1)).item()


def require_near(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    difference = deviation(actual, expected)
    require(difference <= tolerance, f"{what}: off by {difference:.1e} (tolerance {tolerance:.0e})")  # NaN is not near either


def tensors_of(state: State) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, state)
    return found


def same(left: State, right: State) -> bool:
    """Whether two states hold the same tensors, bit for bit."""
    pairs = list(zip(tensors_of(left), tensors_of(right), strict=False))
    return len(tensors_of(left)) == len(tensors_of(right)) and all(torch.equal(a, b) for a, b in pairs)


def copied(state: State) -> State:
    return map_tensors(lambda tensor: tensor.detach().clone(), state)


def combined(logits: Tensor) -> Tensor:
    """A fixed random combination of the logits."""
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return (logits * direction.to(logits.dtype)).sum()


def gradients(model: LanguageModel, logits: Tensor, *, retain_graph: bool = False) -> dict[str, Tensor]:
    """By name, the gradients of ``combined`` logits. Every parameter must be part of the graph."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    values = torch.autograd.grad(combined(logits), parameters, allow_unused=True, retain_graph=retain_graph)
    found = dict(zip(names, values, strict=True))
    missing = [name for name, gradient in found.items() if gradient is None]
    require(not missing, f"no path from {listed(missing)} to the output")
    return found


def listed(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
