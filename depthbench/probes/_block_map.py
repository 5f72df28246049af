"""What the probes that look at a block as a map, from the stream that it gets to the stream that it leaves, ask of a design."""

from __future__ import annotations

from depthbench.residuals.base import Residual


def without_stream(residual: Residual) -> str:
    """Why a design's blocks cannot be looked at as maps; empty where they can."""
    missing = [name for name in ("stream", "with_stream") if getattr(type(residual), name) is getattr(Residual, name)]
    return f"{type(residual).__name__} does not say what a block maps: implement {' and '.join(missing)}" if missing else ""
