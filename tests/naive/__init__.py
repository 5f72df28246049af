"""The designs written as their equations read, with stacks and einsums: executable specifications, and what the benchmark stands beside."""

from __future__ import annotations

import pkgutil
from importlib import import_module


def forms() -> list[type]:
    """The naive form of every design that has one: each module's ``NAIVE``."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    return [import_module(f"{__name__}.{name}").NAIVE for name in names]
