"""What a user did wrong, in one line that says how to mend it.

Every verb turns a ``UserError`` into that one line on standard error and exit code 2. Anything else that is raised is a fault of
ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake the user can mend. The message is one line: what is wrong, and how to mend it."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that is not known: names the nearest known one, then all of them.

    >>> str(unknown("size", "nanno", ["pico", "nano"]))
    "unknown size 'nanno': did you mean 'nano'? (known: pico, nano)"
    """
    known = list(known)
    close = difflib.get_close_matches(str(name), known, n=1, cutoff=0.4)
    listed = ", ".join(known)
    if close:
        return UserError(f"unknown {kind} '{name}': did you mean '{close[0]}'? (known: {listed})")
    return UserError(f"unknown {kind} '{name}'; known: {listed}")
