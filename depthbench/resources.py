"""Where the files that ship with the package lie: inside the wheel, or at the top of a source checkout."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent


def resource(*parts: str) -> Path:
    """Path of a shipped file or folder, e.g. ``resource("conf", "sizes.yaml")`` or ``resource("app", "main.py")``.

    Raises FileNotFoundError when the installation lacks it (a broken install, not a user's mistake).
    """
    for root in (PACKAGE, PACKAGE.parent):
        path = root.joinpath(*parts)
        if path.exists():
            return path
    raise FileNotFoundError(f"{Path(*parts)} is missing from this installation of depthbench")
