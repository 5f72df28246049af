"""Tables, sizes and times as lines of text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def columns(rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> list[str]:
    """Rows of cells as aligned lines, the first row the headings; ``right``: the columns set to the right, as numbers are."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) if n in right else cell.ljust(width) for n, (cell, width) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


def named(facts: Mapping[str, str], indent: str = "  ") -> list[str]:
    """A line for each fact that has a text, its name before it."""
    facts = {name: text for name, text in facts.items() if text}
    width = max(map(len, facts), default=0)
    return [f"{indent}{name:<{width}}  {text}" for name, text in facts.items()]


def size(n_bytes: int) -> str:
    """Bytes in decimal units, as disks are sold."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:,.1f} {unit}"
    return f"{n_bytes} B"


def loss(value: float | None) -> str:
    """Nats per token; infinity is said; NaN, as which the store gives what was never measured, is a dash."""
    return "-" if value is None or math.isnan(value) else f"{value:.4f}"


def counted(n: int, noun: str) -> str:
    """1 run, 2 runs."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
