"""Scales of colours and axes: linear, logarithmic, or symmetric about a value where distances from it span decades."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SPREAD = 50.0  # so many times smaller values, and a linear scale does not show both
QUANTILES = (0.01, 0.99)


@dataclass(frozen=True)
class Scale:
    """How values become places: ``kind`` is "linear", "log" (of positive values) or "symlog".

    A symmetric logarithm about ``origin``, sign(v - o) log10(1 + |v - o| / threshold), is linear within ``threshold`` of the origin and
    logarithmic beyond it.
    """

    kind: str = "linear"
    threshold: float = 1.0
    origin: float = 0.0

    @property
    def note(self) -> str:
        """What the title of an axis adds, in a line of its own where it is long."""
        if self.kind == "symlog":
            return f"<br>symmetric log scale, linear within ±{self.threshold:g}" + (f" of {self.origin:g}" if self.origin else "")
        return ", log scale" if self.kind == "log" else ""

    def place(self, values: np.ndarray) -> np.ndarray:
        """Where values lie; NaN for what is not finite, and on a log scale for what is not positive."""
        values = np.where(np.isfinite(values), values, np.nan).astype(float)
        if self.kind == "log":
            return np.log10(np.where(values > 0, values, np.nan))
        if self.kind == "symlog":
            return np.sign(values - self.origin) * np.log10(1 + np.abs(values - self.origin) / self.threshold)
        return values

    def limits(self, values: np.ndarray) -> tuple[float, float]:
        """Colour limits: the places of the 1 % and 99 % quantiles of the finite values; symmetric about 0 where signs differ."""
        places = self.place(np.asarray(values, dtype=float))
        places = places[np.isfinite(places)]
        if not len(places):
            return 0.0, 1.0
        low, high = (float(q) for q in np.quantile(places, QUANTILES))
        if self.kind != "log" and low < 0 < high:
            low, high = -max(-low, high), max(-low, high)
        if np.isclose(low, high, rtol=1e-6, atol=1e-12):
            pad = abs(low) * 0.05 or 0.5
            low, high = low - pad, high + pad
        return low, high

    def ticks(self, low: float, high: float) -> dict:
        """``tickvals`` and ``ticktext`` between two places: round values, the more per decade the fewer decades there are.

        Empty for a linear scale, which Plotly labels well.
        """
        if self.kind == "linear":
            return {}
        values = _round_values(low, high) if self.kind == "log" else self.origin + self._round_distances(max(abs(low), abs(high)))
        places = self.place(values)
        inside = (places >= low - 1e-9) & (places <= high + 1e-9)
        return {"tickvals": places[inside], "ticktext": [f"{value:.4g}" for value in values[inside]]}

    def _round_distances(self, reach: float) -> np.ndarray:
        """Round distances from the origin of a symmetric logarithm, of both signs, up to the place ``reach``."""
        last = np.log10(self.threshold) + np.log10(max(10**reach - 1, 1e-9))
        sizes = 10.0 ** np.arange(np.ceil(np.log10(self.threshold)), np.floor(last + 1e-9) + 1)
        sizes = sizes[:: -(-len(sizes) // 5)] if len(sizes) else np.array([10**last])
        return np.concatenate([-sizes[::-1], [0.0], sizes])


def fitting(values: np.ndarray, *, origin: float | None = None) -> Scale:
    """The scale that shows all of ``values``: linear unless they span decades, then logarithmic if all are positive, else symmetric.

    ``origin``: the value that bars stand on; it has a place on the scale whatever the values are.
    """
    finite = np.asarray(values, dtype=float)
    finite = finite[np.isfinite(finite)]
    if origin is None and len(finite) and (finite > 0).all():
        return Scale("log") if finite.max() > SPREAD * np.quantile(finite, 0.05) else Scale()
    sizes = np.abs(finite - (origin or 0.0))
    typical = np.median(sizes[sizes > 0]) if (sizes > 0).any() else 0.0
    if not typical or sizes.max() <= SPREAD * typical:
        return Scale()
    return Scale("symlog", 10.0 ** np.floor(np.log10(typical)), origin or 0.0)


def _round_values(low: float, high: float) -> np.ndarray:
    span = high - low
    if span > 6:
        return 10.0 ** np.arange(np.ceil(low), np.floor(high) + 1, max(1, round(span / 6)))
    steps = [1] if span > 3 else [1, 2, 5] if span > 1 else [1, 1.5, 2, 3, 4, 5, 7]
    values = np.concatenate([np.array(steps) * 10.0**k for k in np.arange(np.floor(low), np.ceil(high) + 1)])
    inside = values[(np.log10(values) >= low - 1e-9) & (np.log10(values) <= high + 1e-9)]
    return inside if len(inside) >= 2 else 10.0 ** np.array([low, high])
