"""The colours: stable, and far enough apart for colour-blind eyes."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from depthbench.figures import palette

# Machado et al. 2009, severity 1, on linear RGB.
VISION = {
    "normal": np.eye(3),
    "protan": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deutan": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
}
TO_XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])


def linear(color: str) -> np.ndarray:
    c = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    t = TO_XYZ @ np.clip(rgb, 0, 1) / np.array([0.95047, 1.0, 1.08883])
    f = np.where(t > 0.008856, np.cbrt(t), 7.787 * t + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(a: str, b: str) -> float:
    high, low = sorted((float(TO_XYZ[1] @ linear(c)) for c in (a, b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("vision", VISION)
def test_designs_differ_for_every_eye(vision):
    seen = {design: lab(VISION[vision] @ linear(color)) for design, color in palette.DESIGN_COLORS.items()}
    nearest = min(np.linalg.norm(seen[a] - seen[b]) for a, b in combinations(seen, 2))
    assert nearest > 12  # CIE76: five times what is just noticeable


def test_designs_stand_out_on_light_and_dark_pages():
    for color in palette.DESIGN_COLORS.values():
        assert contrast(color, "#ffffff") > 2.1
        assert contrast(color, "#0e1117") > 2.8


def test_each_of_ten_designs_has_its_own_colour_and_marker():
    assert len(palette.DESIGN_COLORS) == 10
    assert len(set(palette.DESIGN_COLORS.values())) == len(set(palette.DESIGN_SYMBOLS.values())) == 10
    assert set(palette.DESIGN_COLORS) == set(palette.DESIGN_SYMBOLS)


def test_an_unknown_design_keeps_its_colour():
    # Literal values: a colour that changes between sessions or releases would repaint old figures.
    assert palette.color("my_module.MyDesign") == "#8a9a2e"
    assert palette.symbol("my_module.MyDesign") == "star-square"


@pytest.mark.parametrize("design", palette.DESIGN_COLORS)
def test_runs_of_one_design_differ_in_shade_dash_or_marker(design):
    styles = palette.run_styles(design, 12)
    assert len({(s["color"], s["dash"]) for s in styles}) == len({(s["color"], s["symbol"]) for s in styles}) == 12
    seen = [lab(linear(color)) for color in {s["color"] for s in styles}]
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 10


def test_shades_go_from_dark_to_light_around_the_design():
    shades = palette.shades("hc", 5)
    brightness = [float(TO_XYZ[1] @ linear(c)) for c in shades]
    assert brightness == sorted(brightness)
    assert len(set(shades)) == 5
    assert palette.shades("hc", 1) == [palette.color("hc")]
    assert palette.shades("hc", 0) == []
