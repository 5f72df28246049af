"""Maps of a value over pairs of places in the network: one square per run, side by side, with one colour scale.

Row 0 is at the top, as in a matrix: what comes first in the network stands at the top and at the left.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from depthbench.figures import palette, scales, style

MAX_PANELS = 8  # four runs, by two skip rules
SIDE = 520  # pixels of a lone square
SIDE_OF_SEVERAL = 390
FRAME = "rgba(128,138,150,0.95)"
MARK = "#ff4d4d"


@dataclass(frozen=True)
class Axis:
    """An axis of a map: its title, and the word by which the hover calls a place on it."""

    title: str
    word: str


BLOCKS = {"i": Axis("block i (0 = first)", "block"), "j": Axis("block j (0 = first)", "block")}
BOUNDARIES = {
    "i": Axis("depth state i (0 = embedding)", "state"),
    "j": Axis("depth state j (0 = embedding)", "state"),
}


def pair_map(
    panels: dict[str, pd.DataFrame],
    *,
    rows: Axis,
    columns: Axis,
    name: str,
    square: bool = True,
    mirrored: bool = False,
    diagonal: float | None = None,
    fit_scale: bool = False,
    lowest: float = 0.0,
    late: bool = False,
    marks: dict[str, float] | None = None,
    relative: bool = False,
) -> go.Figure:
    """Cells of ``panels`` (title -> rows with i, j, value), i downwards and j to the right; at most MAX_PANELS.

    ``name``: title of the colour bar. ``square``: rows and columns count the same places. ``mirrored``: a value of (i, j) is shown at
    (j, i) too, and ``diagonal`` between them. ``fit_scale``: logarithmic colours where values span decades; else the scale is linear
    and begins at ``lowest`` where no value is below. ``late``: a frame around the last three quarters of the network. ``marks``:
    title -> j of a vertical line. ``relative``: places as fractions of the depth, to compare runs of different depths. Recorded cells
    that are not finite have the colour palette.NOT_FINITE, named in the legend; the others stay empty.
    """
    shown = dict(list(panels.items())[:MAX_PANELS])
    across = 1 if len(shown) == 1 else 2
    down = -(-len(shown) // across)
    result = make_subplots(
        down, across, subplot_titles=list(shown) if any(shown) else None, vertical_spacing=0.2 / down, horizontal_spacing=0.32 / across
    )
    every = pd.concat([p["value"] for p in shown.values()]).to_numpy(float)
    scale = scales.fitting(every) if fit_scale else scales.Scale()
    low, high = scale.limits(every)
    if not fit_scale and low >= lowest:
        low = lowest
    lost = False
    for number, (title, cells) in enumerate(shown.items()):
        where = {"row": number // across + 1, "col": number % across + 1}
        values, recorded = _grid(cells, square=square, mirrored=mirrored, diagonal=diagonal)
        lost |= _add_panel(result, values, recorded, scale, where, rows, columns, relative=relative)
        _lay_out(result, values.shape, where, number, rows, columns, relative=relative)
        size = values.shape[1]
        if late and size > 1:
            first = -(-size // 4)
            corners = (first / size, 1.0) if relative else (first - 0.5, size - 0.5)
            line = {"color": FRAME, "width": 1.5, "dash": "dot"}
            result.add_shape(type="rect", x0=corners[0], x1=corners[1], y0=corners[0], y1=corners[1], line=line, **where)
        if marks and title in marks:
            at = marks[title] / size if relative else marks[title] - 0.5
            result.add_vline(x=at, line={"color": MARK, "width": 2, "dash": "dash"}, **where)
    bar = {"title": {"text": name + scale.note, "side": "right"}, "thickness": 14, "outlinewidth": 0, "len": 1, "ypad": 0}
    bar |= {"y": 1, "yanchor": "top"}
    colors = palette.DIVERGING if low < 0 < high and scale.kind != "log" else palette.SEQUENTIAL
    result.update_layout(coloraxis={"colorscale": colors, "cmin": low, "cmax": high, "colorbar": bar | scale.ticks(low, high)})
    if lost:
        marker = {"symbol": "square", "size": 11, "color": palette.NOT_FINITE}
        result.add_scatter(x=[None], y=[None], mode="markers", marker=marker, name="not finite (NaN or infinite)", showlegend=True)
    side = SIDE if len(shown) == 1 else SIDE_OF_SEVERAL
    result.update_layout(
        width=across * (side + 50) + 130,
        height=down * (side + 60) + 50,
        margin={"l": 64, "r": 16, "t": 44 if any(shown) else 24, "b": 56},
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": -0.08, "yanchor": "top"},
        **style.BACKGROUND,
    )
    return result


def _grid(cells: pd.DataFrame, *, square: bool, mirrored: bool, diagonal: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Values, NaN where there is none, and which of them were recorded."""
    i, j = cells["i"].to_numpy(int), cells["j"].to_numpy(int)
    shape = (max(i.max(), j.max()) + 1,) * 2 if square else (i.max() + 1, j.max() + 1)
    values, recorded = np.full(shape, np.nan), np.zeros(shape, dtype=bool)
    for at in ((i, j), (j, i)) if mirrored else ((i, j),):
        values[at], recorded[at] = cells["value"].to_numpy(float), True
    if diagonal is not None:
        np.fill_diagonal(values, diagonal)
    return values, recorded


def _add_panel(result, values, recorded, scale, where, rows, columns, *, relative) -> bool:
    """One run's cells; returns whether any of them is not finite."""
    y, x = (np.arange(n + 1) / n if relative else np.arange(n) for n in values.shape)
    places = ":.2f" if relative else ""
    where_text = f"{rows.word} %{{y{places}}} → {columns.word} %{{x{places}}}"
    common = {"x": x, "y": y, "hoverongaps": False, "xgap": 0, "ygap": 0}
    drawn = scale.place(values).astype(np.float32)  # half the bytes on the page; four digits are shown
    linear = scale.kind == "linear"
    result.add_heatmap(
        z=drawn,
        coloraxis="coloraxis",
        customdata=None if linear else values.astype(np.float32),
        hovertemplate=f"{where_text}<br><b>%{{{'z' if linear else 'customdata'}:.4g}}</b><extra></extra>",
        **common,
        **where,
    )
    bad = recorded & ~np.isfinite(values)
    if bad.any():
        result.add_heatmap(
            z=np.where(bad, 1.0, np.nan).astype(np.float32),
            colorscale=[[0, palette.NOT_FINITE], [1, palette.NOT_FINITE]],
            showscale=False,
            name="not finite",
            hovertemplate=f"{where_text}<br><b>not finite</b><extra></extra>",
            **common,
            **where,
        )
    return bool(bad.any())


def _lay_out(result, shape, where, number, rows, columns, *, relative) -> None:
    down, across = shape
    anchor = "x" if number == 0 else f"x{number + 1}"
    house = {**style.axis_style(), "showgrid": False}
    suffix = ", relative depth" if relative else ""
    x_range, y_range = ([0, 1], [1, 0]) if relative else ([-0.5, across - 0.5], [down - 0.5, -0.5])
    result.update_xaxes(
        type="linear", title_text=columns.title + suffix, range=x_range, constrain="domain", constraintoward="left", **house, **where
    )
    result.update_yaxes(
        type="linear",
        title_text=rows.title + suffix,
        range=y_range,
        scaleanchor=anchor if across == down else None,
        constrain="domain",
        constraintoward="top",
        **house,
        **where,
    )
