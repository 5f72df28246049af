"""One colour and one marker per design, the same in every figure, and colours for run status.

The ten colours were searched, within a hue range per family, for the largest smallest distance (CIEDE2000) between any two as seen
with normal, protan and deutan vision (Machado et al. 2009), at a contrast of at least 2.2 on white and 2.8 on near-black. Related
designs share a hue: hyper-connections are blue, attention residuals orange, normalisation variants green. The marker is a
second channel that needs no colour at all.
"""

from __future__ import annotations

import colorsys
import hashlib

BASELINE = "#6a7787"

DESIGN_COLORS = {
    "pre_ln": BASELINE,
    "sandwich_ln": "#86bc73",
    "lns": "#1da489",
    "deepnorm": "#644ebd",
    "keel": "#b13468",
    "hc": "#3386e6",
    "mhc": "#68b3d9",
    "full_attnres": "#dc6337",
    "block_attnres": "#f2930d",
    "moda": "#775a2d",
}
DESIGN_SYMBOLS = {
    "pre_ln": "circle",
    "sandwich_ln": "square",
    "lns": "diamond",
    "deepnorm": "triangle-up",
    "keel": "triangle-down",
    "hc": "pentagon",
    "mhc": "hexagon",
    "full_attnres": "star",
    "block_attnres": "cross",
    "moda": "x",
}
# For designs of the user's own module: picked by a hash of the name, so that a design keeps its colour from session to session.
OTHER_COLORS = ("#3f7f93", "#a0527f", "#8a9a2e", "#5b6ee1", "#c77b58", "#4d9a4f", "#9a6fb0", "#b8860b")
OTHER_SYMBOLS = ("hourglass", "bowtie", "star-square", "star-diamond", "diamond-tall", "diamond-wide", "hexagram", "octagon")

STATUS_COLORS = {
    "running": "#3386e6",
    "finished": "#2e9e5b",
    "interrupted": "#d08a00",
    "stale": "#8d97a5",
    "failed": "#d2453d",
    "diverged": "#a5359a",
    "unreadable": "#8d97a5",
}

NOT_FINITE = "#e834c8"  # magenta: in none of the colour scales used for layers
SEQUENTIAL = "Viridis"
DIVERGING = "RdBu_r"


def _pick(name: str, among: tuple[str, ...]) -> str:
    return among[hashlib.sha256(name.encode()).digest()[0] % len(among)]


def color(design: str) -> str:
    """Hex colour of a design, the same for all its variants (the name, a blank, options); of an unknown name one of its own."""
    name = design.partition(" ")[0]
    return DESIGN_COLORS.get(name) or _pick(name, OTHER_COLORS)


def symbol(design: str) -> str:
    """Plotly marker symbol of a design; a variant has another than the design itself."""
    return DESIGN_SYMBOLS.get(design) or _pick(design, OTHER_SYMBOLS)


SHADES = 4  # so many of one design are told apart
DASHES = ("solid", "dash", "dashdot", "longdash")
RUN_SYMBOLS = ("circle", "square", "diamond", "x")


def run_styles(design: str, n: int) -> list[dict[str, str]]:
    """``color``, ``dash`` and ``symbol`` of ``n`` runs of one design: in shades, and beyond SHADES runs in other dashes and markers too."""
    hues = shades(design, min(n, SHADES))
    turns = [i // SHADES % len(DASHES) for i in range(n)]
    return [{"color": hues[i % SHADES], "dash": DASHES[turn], "symbol": RUN_SYMBOLS[turn]} for i, turn in enumerate(turns)]


def shades(design: str, n: int) -> list[str]:
    """``n`` colours of one design from dark to light around its own, for several runs of that design in a figure."""
    base = color(design)
    if n <= 1:
        return [base] * n
    red, green, blue = (int(base[i : i + 2], 16) / 255 for i in (1, 3, 5))
    hue, light, saturation = colorsys.rgb_to_hls(red, green, blue)
    dark = max(0.26, light - 0.24)
    bright = max(min(0.78, light + 0.24), dark + 0.46)  # wide enough for SHADES of them
    lights = [dark + (bright - dark) * i / (n - 1) for i in range(n)]
    return ["#" + "".join(f"{round(255 * c):02x}" for c in colorsys.hls_to_rgb(hue, v, saturation)) for v in lights]
