"""torch.compile by region.

A whole model compiled at once would be one graph per depth; here each kind of region is compiled once and serves all blocks,
so that 70 layers compile as fast as 2. A region never falls back in silence: a graph break or more recompilations than dynamo allows
is an error (``fullgraph``).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn


class RegionCompiler:
    """Compiles functions and modules in place, one compiled function per kind of region.

    Dynamo counts recompilations, and turns sizes that vary into symbols, per code object and name. All sublayers run the same code
    (``Sublayer.forward``), and so do other models in the process: each kind here gets a code object and a name of its own. Else a
    second model of another width would run slower code, and the kinds would use up each other's recompilations.
    """

    _number = count()

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._kinds: dict[Any, Callable] = {}

    def function(self, function: Callable) -> Callable:
        """The compiled form of a plain function of tensors."""
        return self._compiled(function, function)

    def module(self, module: nn.Module, kind: Any, regions: tuple[str, ...] = ("forward",)) -> None:
        """Compiles methods of a module in place; its state_dict, its hooks and the modules that hold it do not notice."""
        for name in regions:
            setattr(module, name, MethodType(self._compiled(getattr(type(module), name), (kind, name)), module))

    def _compiled(self, function: Callable, kind: Any) -> Callable:
        if kind not in self._kinds:
            code = function.__code__.replace(co_name=f"{function.__name__}_{next(self._number)}")
            own = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
            own.__kwdefaults__ = function.__kwdefaults__
            self._kinds[kind] = torch.compile(own, fullgraph=True, backend=self.backend)
        return self._kinds[kind]
