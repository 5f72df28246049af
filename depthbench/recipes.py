"""Training recipes: optimizer, schedule, initialisation, and the learning rate of each design at each size. No torch.

The values live in conf/recipes.yaml; the paper's (arXiv 2609.32534) are the recipe "paper".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from depthbench.errors import unknown
from depthbench.resources import resource
from depthbench.shapes import Size, size_named


@dataclass(frozen=True)
class Recipe:
    """One entry of conf/recipes.yaml: AdamW, a cosine schedule with linear warmup, and how weights start.

    Fractions are of the planned optimizer steps (warmup) and of the peak learning rate (final). ``init_cutoff`` counts standard
    deviations. Learning rates stay outside: they depend on size and design, see `learning_rate`.
    """

    name: str
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    warmup_fraction: float
    final_lr_fraction: float
    init_std: float
    init_cutoff: float
    norm_eps: float
    decay_vectors: bool = False  # weight decay on norms, biases and scalars too

    def model_kwargs(self) -> dict[str, float]:
        """What ``build_model`` needs of a recipe."""
        return {name: getattr(self, name) for name in ("init_std", "init_cutoff", "norm_eps")}


@cache
def _entries() -> dict[str, dict]:
    return yaml.safe_load(resource("conf", "recipes.yaml").read_text(encoding="utf-8"))


def _entry(name: str) -> dict:
    if name not in _entries():
        raise unknown("recipe", name, _entries())
    return _entries()[name]


def recipe(name: str = "paper") -> Recipe:
    """The recipe called ``name``. Raises UserError with the known names."""
    entry = _entry(name)
    optimizer, schedule = dict(entry["optimizer"]), dict(entry["schedule"])
    kinds = optimizer.pop("name"), schedule.pop("name")
    if kinds != ("AdamW", "cosine"):
        raise ValueError(f"conf/recipes.yaml: recipe '{name}' wants {kinds}, and only AdamW with cosine is built")
    return Recipe(name=name, betas=tuple(optimizer.pop("betas")), **optimizer, **schedule, **entry["model"])


def design_options(arch: str, name: str = "paper") -> dict[str, Any]:
    """The options that recipe ``name`` gives to design ``arch`` where a user asks for nothing else."""
    return dict(_entry(name).get("options", {}).get(arch, {}))


def learning_rate(size: str | Size, arch: str, name: str = "paper") -> float:
    """Peak learning rate of design ``arch`` at ``size`` in recipe ``name``: its own for the pair, else the size's. Any design has one."""
    size = size if isinstance(size, Size) else size_named(size)
    return _entry(name)["learning_rates"].get(size.name, {}).get(arch, size.lr)
