"""The residual designs: one file each, nothing but its rule. The file's name is the design's name; the folder is the registry.

Importing this package imports no torch; ``get`` does.
"""

from __future__ import annotations

import inspect
import os
import pkgutil
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from depthbench.errors import UserError, unknown
from depthbench.residuals._options import checked_options, chosen_options, options_of

if TYPE_CHECKING:
    from depthbench.residuals.base import Residual

__all__ = ["checked_options", "chosen_options", "fault_of_own", "get", "names", "options_of"]

FIRST = "pre_ln"  # the baseline heads every list

_own: dict[str, type[Residual]] = {}  # the user's designs that this process has imported
_raised: dict[str, Exception] = {}  # and what their modules raised instead


def names() -> list[str]:
    """Names of the designs that ship, the baseline first."""
    files = [module.name for module in pkgutil.iter_modules(__path__)]
    designs = [name for name in files if name != "base" and not name.startswith("_")]
    return sorted(designs, key=lambda name: (name != FIRST, name))


def get(name: str | type[Residual]) -> type[Residual]:
    """The class of a design: by its name, by a dotted ``my_module.MyDesign``, or the class itself.

    A module of the user's is looked for in the current folder too. Raises UserError for what cannot be found or is no design.
    """
    from depthbench.residuals.base import Residual

    if isinstance(name, type) and issubclass(name, Residual):
        return name
    if not isinstance(name, str):
        raise UserError(f"a design is a name, 'my_module.MyDesign' or a subclass of Residual, not {name!r}")
    if "." in name:
        return _imported(name, Residual)
    if name not in names():
        raise unknown("design", name, [*names(), "or your own: my_module.MyDesign"])
    module = import_module(f"{__name__}.{name}")
    (design,) = (
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Residual) and value.__module__ == module.__name__
    )
    return design


def _imported(dotted: str, base: type) -> type:
    if not all(part.isidentifier() for part in dotted.split(".")):
        raise UserError(f"'{dotted}' names no class: write my_module.MyDesign")
    module_name, _, class_name = dotted.rpartition(".")
    if os.getcwd() not in sys.path and "" not in sys.path:  # a console script starts without the current folder
        sys.path.append(os.getcwd())
    try:
        module = import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise UserError(f"no module '{module_name}' for design '{dotted}': start in the folder that holds it, or install it") from None
        _raised[dotted] = error
        raise  # the module is there; it, or something that it imports, is broken
    value = getattr(module, class_name, None)
    if not (isinstance(value, type) and issubclass(value, base)):
        raise UserError(f"'{class_name}' in '{module_name}' is no design: it must be a subclass of depthbench.residuals.base.Residual")
    _own.pop(dotted, None)
    _own[dotted] = value
    return value


def fault_of_own(error: Exception) -> UserError | None:
    """What a user's own design raised, in one line with its place; None where no design of theirs led to ``error``.

    It did where its file is on the way to the error, or where the error is that it lacks a method.
    """
    from depthbench.contract.explain import brief, passes

    for dotted, raised in _raised.items():
        if raised is error:
            return UserError(f"{dotted} cannot be imported: {', at '.join(brief(error).splitlines())}")
    for dotted, design in reversed(_own.items()):  # where a file holds several, the one named last is at work
        if getattr(error, "design", None) is design or passes(error, design):
            said = ", at ".join(brief(error, design).splitlines())
            return UserError(f"design {dotted}: {said}; `depthbench check {dotted} --traceback` tries it piece by piece")
    return None
