"""Numbers as people write them on a command line."""

from __future__ import annotations

from decimal import Decimal

from depthbench.errors import UserError

SCALE = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
LARGEST = 10**18


def whole_number(text: str | int | float, name: str) -> int:
    """A whole number: 2000000, 2,000,000, 2e6, 2M or 1.5B. Raises UserError, calling it ``name``, for anything else.

    >>> whole_number("1.5k", "--tokens")
    1500
    """
    written = str(text).strip().replace(",", "").replace("_", "")
    scale = SCALE.get(written[-1:].lower(), 1)
    try:
        value = Decimal(written[:-1] if scale > 1 else written) * scale
        if value != int(value) or abs(value) > LARGEST:
            raise ValueError
    except (ArithmeticError, ValueError):
        raise UserError(f"{name} is '{text}', no whole number: write it as 2000, 256k, 10M or 1.5B") from None
    return int(value)
