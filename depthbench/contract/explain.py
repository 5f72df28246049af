"""An exception in a line or two: what was raised, and the line of the design's own file that it came from."""

from __future__ import annotations

import inspect
import linecache
import sys
import traceback
from pathlib import Path

from depthbench.contract.subject import ContractError

LONGEST = 400


def brief(error: BaseException, design: type) -> str:
    """A ContractError's message as it is; of any other exception the first line, and the last place in the design's file that led there."""
    if isinstance(error, ContractError):
        return str(error)
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    said = f"{type(error).__name__}: {first}" if first else type(error).__name__
    if len(said) > LONGEST:
        said = said[:LONGEST] + " …"
    place = where(error, design)
    return f"{said}\n{place}" if place else said


def where(error: BaseException, design: type) -> str:
    """``file:line, in function: code`` of the innermost frame in the file that defines the design, if any."""
    frames = [*traceback.extract_tb(error.__traceback__), *(getattr(error, "real_stack", None) or ())]  # compiled code has its own stack
    file = source_of(design)
    own = [frame for frame in frames if frame.filename == file]
    if not own:
        return ""
    line = linecache.getline(own[-1].filename, own[-1].lineno).strip()
    return f"{Path(file).name}:{own[-1].lineno}, in {own[-1].name}: {line}"


def source_of(design: type) -> str | None:
    module = sys.modules.get(design.__module__)
    try:
        return inspect.getsourcefile(module or design)
    except TypeError:
        return None
