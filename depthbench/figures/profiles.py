"""Profiles: values over depth, one line (or one set of bars) per run, one row of the figure per quantity."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from depthbench.figures import palette, scales, style

ROW_HEIGHT = 210
ONE_ROW = 400
REFERENCE = "rgba(128,138,150,0.95)"
LOST = {"symbol": "x", "size": 9, "color": palette.NOT_FINITE}
DISTINCT = (palette.BASELINE, *palette.OTHER_COLORS)  # for runs whose colours the caller does not choose


@dataclass(frozen=True)
class Quantity:
    """What one row of the figure shows: a metric over its index ``i``.

    ``reference``: a level with its label, drawn as a line. ``base``: where bars stand; None for lines. ``stderr``: the metric that
    holds its standard error. ``fit_scale``: a logarithmic axis where values span decades. ``limits``: of a linear axis.
    """

    metric: str
    title: str
    reference: tuple[float, str] | None = None
    base: float | None = None
    stderr: str | None = None
    fit_scale: bool = False
    limits: tuple[float, float] | None = None


@dataclass(frozen=True)
class Depth:
    """The x axis: its title, what the hover calls a place on it, and whether indices are boundaries (0 to L) or blocks (0 to L - 1).

    ``relative``: a boundary l lies at l / L, a block at its end.
    """

    title: str = "block l (0 = first)"
    word: str = "block"
    states: bool = False
    relative: bool = False

    def positions(self, i: pd.Series, last: int) -> np.ndarray:
        """Where the indices ``i`` of a run lie whose largest index, of all quantities, is ``last``."""
        i = i.to_numpy(float)
        if not self.relative:
            return i
        return i / max(last, 1) if self.states else (i + 1) / (last + 1)


def over_depth(
    panels: dict[str, pd.DataFrame], quantities: list[Quantity], depth: Depth, *, colors: dict[str, str] | None = None
) -> go.Figure:
    """``panels``: title -> rows (metric, i, value) of a run; ``quantities`` from top to bottom, of which those without a row are left out.

    ``colors``: title -> colour. One run's bars are bars, several runs' are lines. Values that are not finite are gaps, and crosses of
    the colour palette.NOT_FINITE at the lower edge.
    """
    present = [q for q in quantities if any((rows["metric"] == q.metric).any() for rows in panels.values())]
    colors = dict(zip(panels, cycle(DISTINCT), strict=False)) | (colors or {})
    result = make_subplots(max(1, len(present)), 1, shared_xaxes=True, vertical_spacing=0.06)
    house = style.base_figure(legend="right").layout
    result.update_layout(margin=house.margin, legend=house.legend, hoverlabel=house.hoverlabel, **style.BACKGROUND)
    result.update_xaxes(**style.axis_style())
    result.update_yaxes(**style.axis_style())
    result.update_layout(height=ONE_ROW if len(present) <= 1 else ROW_HEIGHT * len(present) + 70, showlegend=len(panels) > 1, bargap=0.25)
    for number, quantity in enumerate(present, start=1):
        rows_of = {title: rows[rows["metric"] == quantity.metric].sort_values("i") for title, rows in panels.items()}
        _add_row(result, {"row": number, "col": 1}, quantity, rows_of, panels, depth, colors)
    named = [rows["i"].max() for rows in panels.values() if rows["i"].notna().any()]
    result.update_xaxes(type="linear", range=[-0.02, 1.03] if depth.relative else [-0.6, max(named, default=0) + 0.6])
    result.update_xaxes(title_text="relative depth l / L" if depth.relative else depth.title, row=max(1, len(present)))
    return result


def _add_row(result, where, quantity, rows_of, panels, depth, colors) -> None:
    """One quantity of all runs: ``rows_of`` holds its own rows, ``panels`` all of them."""
    every = pd.concat([rows["value"] for rows in rows_of.values()]).to_numpy(float)
    scale = scales.fitting(every, origin=quantity.base) if quantity.fit_scale else scales.Scale()
    for title, recorded in rows_of.items():
        if recorded.empty:
            continue
        rows = recorded if quantity.base is not None else _with_gaps(recorded)
        last, values = int(panels[title]["i"].max()), rows["value"].to_numpy(float)
        named = f"<b>{title}</b><br>" if title else ""
        common = {
            "x": depth.positions(rows["i"], last),
            "y": scale.place(values),
            "name": title,
            "legendgroup": title,
            "customdata": np.column_stack([rows["i"].to_numpy(float), values]),
            "hovertemplate": f"{named}{depth.word} %{{customdata[0]}}<br><b>%{{customdata[1]:.4g}}</b><extra></extra>",
            **where,
        }
        if quantity.base is not None and len(panels) == 1:
            _add_bars(result, common, values, quantity, scale, colors[title])
        else:
            error = _error_bars(panels[title], quantity, rows, scale, colors[title])
            line, marker = {"color": colors[title], "width": 2}, {"size": 5, "color": colors[title]}
            first = where["row"] == 1
            result.add_scatter(mode="lines+markers", line=line, marker=marker, error_y=error, connectgaps=False, showlegend=first, **common)
        bad = recorded.loc[~np.isfinite(recorded["value"].astype(float)), "i"]
        if len(bad):
            edge = scale.place(every[np.isfinite(every)]).min() if np.isfinite(every).any() else 0.0
            hover = [f"{named}{depth.word} {i:.0f}<br><b>not finite</b>" for i in bad]
            crosses = {"x": depth.positions(bad, last), "y": np.full(len(bad), edge), "hovertext": hover, "hoverinfo": "text"}
            result.add_scatter(mode="markers", name="not finite", marker=LOST, showlegend=False, **crosses, **where)
    _lay_out(result, where, quantity, scale, every)


def _with_gaps(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with one more, without a value, at each index between the first and the last that has none: a line does not pass there."""
    every = pd.RangeIndex(int(rows["i"].min()), int(rows["i"].max()) + 1, name="i")
    return rows.astype({"i": int}).set_index("i").reindex(every).reset_index()


def _add_bars(result, common, values, quantity, scale, color) -> None:
    """Bars from the base; those that do not reach the reference are faint."""
    marker = {"color": color, "line": {"width": 0}}
    if quantity.reference:
        marker["opacity"] = np.where(values > quantity.reference[0], 1.0, 0.4)
    base = scale.place(np.array(quantity.base)).item()
    result.add_bar(**{**common, "y": common["y"] - base}, base=base, marker=marker, showlegend=False)


def _error_bars(rows, quantity, shown, scale, color) -> dict | None:
    """One standard error up and down, where it was estimated."""
    errors = rows[rows["metric"] == quantity.stderr]
    if errors.empty:
        return None
    values, sizes = shown["value"].to_numpy(float), errors.set_index("i")["value"].reindex(shown["i"]).to_numpy(float)
    up, down = scale.place(values + sizes) - scale.place(values), scale.place(values) - scale.place(values - sizes)
    return {"type": "data", "array": up, "arrayminus": down, "symmetric": False, "thickness": 1.2, "width": 3, "color": color}


def _lay_out(result, where, quantity, scale, values) -> None:
    """The y axis: places are linear on it, and its ticks say the values."""
    result.update_yaxes(type="linear", title_text=quantity.title + scale.note, **where)
    level, label = quantity.reference or (np.nan, "")
    kept = [quantity.base] if quantity.base is not None else []
    places = scale.place(np.array([*values, *kept, level]))
    finite = places[np.isfinite(places)]
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 1.0)
    margin = 0.06 * (high - low) or 0.06 * abs(high) or 0.5
    if scale.kind != "linear":
        low, high = (low if low == 0 and kept else low - margin), high + margin
        result.update_yaxes(range=[low, high], **scale.ticks(low, high), **where)
    elif quantity.limits:
        result.update_yaxes(range=list(quantity.limits), **where)
    for base in kept:
        result.add_hline(y=scale.place(np.array(base)).item(), line={"color": style.AXIS, "width": 1}, **where)
    if quantity.reference:
        line = {"color": REFERENCE, "width": 1.3, "dash": "dash"}
        text = {"annotation_text": label, "annotation_position": "top right", "annotation_font_size": 11}
        result.add_hline(y=scale.place(np.array(level)).item(), line=line, **text, **where)
