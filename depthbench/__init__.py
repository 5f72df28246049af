"""DepthBench: does depth pay? Ten residual designs, one recipe, every shape of a parameter budget."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from depthbench import probes
    from depthbench.nn.model import build_model
    from depthbench.shapes import solve_shape
    from depthbench.training.runs import load_run

__version__ = "0.1.0"
__all__ = ["__version__", "build_model", "load_run", "probes", "solve_shape"]

# Resolved on first use, so that `import depthbench` (and `depthbench --help`) costs no torch import.
_HOME = {"build_model": "depthbench.nn.model", "solve_shape": "depthbench.shapes", "load_run": "depthbench.training.runs"}


def __getattr__(name: str):
    if name == "probes":
        return import_module("depthbench.probes")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'depthbench' has no attribute '{name}'")
