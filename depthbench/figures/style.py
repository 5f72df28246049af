"""What all figures share: margins, legend, grid and hover, readable on a light and on a dark page."""

from __future__ import annotations

import plotly.graph_objects as go

GRID = "rgba(128,138,150,0.22)"
AXIS = "rgba(128,138,150,0.55)"
BACKGROUND = {  # that of the page, whichever it is
    "plot_bgcolor": "rgba(0,0,0,0)",
    "paper_bgcolor": "rgba(0,0,0,0)",
    "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "rgba(128,138,150,0.7)", "activecolor": "#3386e6"},
}
CONFIG = {  # for st.plotly_chart and for HTML export: the PNG button saves what is shown, at twice the resolution
    "displaylogo": False,
    "displayModeBar": "hover",
    "modeBarButtonsToRemove": ["lasso2d", "select2d", "autoScale2d"],
    "toImageButtonOptions": {"format": "png", "filename": "depthbench", "scale": 2},
}
TOKENS_AXIS = "tokens seen"
WALL_AXIS = "wall-clock time (s)"
STEP_AXIS = "optimizer step"


def base_figure(*, height: int = 460, legend: str = "right") -> go.Figure:
    """An empty figure in the house style. ``legend``: "right", "bottom" or "none"."""
    figure = go.Figure()
    places = {
        "right": {"x": 1.02, "xanchor": "left", "y": 1, "yanchor": "top"},
        "bottom": {"orientation": "h", "x": 0, "y": -0.18, "yanchor": "top"},
        "none": {},
    }
    figure.update_layout(
        height=height,
        margin={"l": 64, "r": 16, "t": 32, "b": 56},
        hoverlabel={"namelength": -1},
        legend={**places[legend], "font": {"size": 12}, "title": {"font": {"size": 12}}},
        showlegend=legend != "none",
        **BACKGROUND,
    )
    figure.update_xaxes(**axis_style())
    figure.update_yaxes(**axis_style())
    return figure


def axis_style() -> dict:
    """Axis options of the house style."""
    return {
        "gridcolor": GRID,
        "linecolor": AXIS,
        "showline": True,
        "zeroline": False,
        "ticks": "outside",
        "tickcolor": AXIS,
        "ticklen": 4,
        "title": {"standoff": 12},
        "automargin": True,
    }
