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

__all__ = ["checked_options", "chosen_options", "get", "names", "options_of"]

FIRST = "pre_ln"  # the baseline heads every list


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
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise UserError(f"no module '{module_name}' for design '{dotted}': start in the folder that holds it, or install it") from None
    value = getattr(module, class_name, None)
    if not (isinstance(value, type) and issubclass(value, base)):
        raise UserError(f"'{class_name}' in '{module_name}' is no design: it must be a subclass of depthbench.residuals.base.Residual")
    return value
