"""An exception in a line or two: what was raised, and the line of the design's own file that it came from."""

from __future__ import annotations

import linecache
import sys
import traceback
from pathlib import Path

from depthbench.contract.subject import ContractError
from depthbench.resources import PACKAGE

LONGEST = 400
CHECKING = Path(__file__).parent


def brief(error: BaseException, design: type | None = None) -> str:
    """A ContractError's message as it is; of any other exception its first line, and the place in the user's file that led there."""
    if isinstance(error, ContractError):
        return str(error)
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    said = f"{type(error).__name__}: {first}" if first else type(error).__name__
    if len(said) > LONGEST:
        said = said[:LONGEST] + " …"
    place = where(error, design)
    return f"{said}\n{place}" if place else said


def where(error: BaseException, design: type | None) -> str:
    """``file:line, in function: code`` of the innermost frame in the file that defines the design (None: in any outside this package);
    where there is none, in what designs stand on; else nothing."""
    if isinstance(error, SyntaxError):  # it names the place itself
        return ""
    in_compiled_code = getattr(error, "real_stack", None) or ()
    stack = [*traceback.extract_tb(error.__traceback__), *in_compiled_code]
    frames = [(Path(frame.filename), frame) for frame in stack if not frame.filename.startswith("<")]
    file = source_of(design)
    own = [frame for path, frame in frames if (path == file if file else PACKAGE not in path.parents)]
    below = [frame for path, frame in frames if PACKAGE in path.parents and CHECKING not in path.parents]
    if not (own or below):
        return ""
    last = (own or below)[-1]
    return f"{Path(last.filename).name}:{last.lineno}, in {last.name}: {linecache.getline(last.filename, last.lineno).strip()}"


def passes(error: BaseException, design: type) -> bool:
    """Whether the file that defines the design is on the way to the error."""
    file = source_of(design)
    return file is not None and any(Path(frame.filename) == file for frame in traceback.extract_tb(error.__traceback__))


def source_of(design: type | None) -> Path | None:
    """The file of the module that defines the design; None where it has none, as in a notebook."""
    file = getattr(sys.modules.get(getattr(design, "__module__", "")), "__file__", None)
    return Path(file) if file else None
