"""The figures of the layer-level probes (definitions and thresholds: arXiv 2609.32534).

Every figure takes ``{title: rows}``, one entry per run (up to four are compared), and shares its limits among them; a lone run's title may
be empty. ``rows`` are a run's rows of one step with columns probe, metric, i, j, value, rule, status, of whichever probes: a figure
takes what it shows. A run that has nothing to show is left out; ValueError where none has. ``relative``: over relative depth, to
compare runs of different depths. ``colors``: title -> colour. `catalogue.PROBES` lists the figures with what a reader needs to know.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from depthbench.figures import maps, palette, profiles, scales, style
from depthbench.figures.maps import BLOCKS, BOUNDARIES, Axis
from depthbench.figures.profiles import Depth, Quantity

CAUSAL_THRESHOLD, PERMUTATION_THRESHOLD, USEFUL_RATIO, DEAD_WEIGHT = 0.45, 0.15, 1.1, 0.01
SUBLAYER = Axis("sublayer l (even: attention, odd: feed-forward, last: readout)", "sublayer")
STATES = Depth("depth state z<sub>l</sub> (0 = embedding)", "state", states=True)

Panels = dict[str, pd.DataFrame]
Colors = dict[str, str] | None


def of_probe(rows: pd.DataFrame, probe: str, metrics: tuple[str, ...] = ()) -> pd.DataFrame:
    """What was measured by a probe, of ``metrics`` where named: no row that says "not defined"."""
    chosen = rows[(rows["probe"] == probe) & (rows["status"] == "ok")]
    return chosen[chosen["metric"].isin(metrics)] if metrics else chosen


def angular(panels: Panels, *, relative: bool = False) -> go.Figure:
    """Map of the angular distance d(i, j) between all depth states, mirrored at the diagonal of zeros."""
    shown = _shown(panels, "angular", ("distance",))
    axes = {"rows": BOUNDARIES["i"], "columns": BOUNDARIES["j"]}
    return maps.pair_map(shown, **axes, name="angular distance (1 = opposite)", mirrored=True, diagonal=0.0, relative=relative)


def causal(panels: Panels, *, relative: bool = False) -> go.Figure:
    """Map of the causal score C(s, l): how much skipping block s changes what block l > s adds. A frame marks the late pairs."""
    axes = {"rows": Axis("skipped block s", "skipped"), "columns": Axis("affected block l", "block")}
    shown = _by_rule(_shown(panels, "causal", ("score",)))
    return maps.pair_map(shown, **axes, name="causal score C(s, l)", late=True, relative=relative)


def permutation(panels: Panels, *, relative: bool = False) -> go.Figure:
    """Map of the permutation score P(i, j), mirrored. A frame marks the late pairs."""
    axes = {"rows": BLOCKS["i"], "columns": BLOCKS["j"]}
    shown = _shown(panels, "permutation", ("score",))
    return maps.pair_map(shown, **axes, name="permutation score P(i, j)", mirrored=True, fit_scale=True, late=True, relative=relative)


def pruning(panels: Panels, *, relative: bool = False, colors: Colors = None) -> go.Figure:
    """Bars of what leaving one block out adds to the loss."""
    shown = _by_rule(_shown(panels, "pruning", ("delta",)))
    rule = f" · {next(iter(shown))}" if len(shown) == 1 and "" in panels else ""
    quantity = Quantity("delta", "loss without block l − loss (nats)", base=0.0, fit_scale=True)
    first_rules = {next(t for t in shown if t.startswith(title)): color for title, color in (colors or {}).items()}
    depth = Depth(f"skipped block l (0 = first){rule}", relative=relative)
    return profiles.over_depth(shown, [quantity], depth, colors=first_rules)


def logit_lens(panels: Panels, *, relative: bool = False, colors: Colors = None) -> go.Figure:
    """Early-exit loss, KL divergence from the final prediction and top-5 overlap with it, over depth."""
    shown = _shown(panels, "logit_lens", ("loss", "kl", "top5_overlap"))
    quantities = [
        Quantity("loss", "early-exit loss (nats)"),
        Quantity("kl", "KL(final ‖ l) (nats)"),
        Quantity("top5_overlap", "top-5 overlap", limits=(0, 1.05)),
    ]
    return profiles.over_depth(shown, quantities, _states(relative), colors=colors)


def usefulness(panels: Panels, *, relative: bool = False, colors: Colors = None) -> go.Figure:
    """Bars of the loss ratio when an affine map stands in for a block, and the line above which the block counts as useful."""
    line = (USEFUL_RATIO, f"useful above {USEFUL_RATIO}")
    quantity = Quantity("loss_ratio", "loss with an affine map / loss", reference=line, base=1.0, fit_scale=True)
    return profiles.over_depth(_shown(panels, "usefulness", ("loss_ratio",)), [quantity], Depth(relative=relative), colors=colors)


def jacobian(panels: Panels, *, relative: bool = False, colors: Colors = None) -> go.Figure:
    """How far each block is from the identity, with a standard error where it was estimated."""
    quantity = Quantity("deviation", "‖J<sub>l</sub> − I‖<sub>F</sub> / √d", stderr="stderr", fit_scale=True)
    return profiles.over_depth(_shown(panels, "jacobian", ("deviation", "stderr")), [quantity], Depth(relative=relative), colors=colors)


def collapse(panels: Panels, *, relative: bool = False, colors: Colors = None) -> go.Figure:
    """Three ranks of a window's token matrix, over depth."""
    quantities = [
        Quantity("stable_rank", "stable rank"),
        Quantity("effective_rank", "effective rank"),
        Quantity("nuclear_ratio", "Σs / √Σs²"),
    ]
    shown = _shown(panels, "collapse", tuple(q.metric for q in quantities))
    return profiles.over_depth(shown, quantities, _states(relative), colors=colors)


def paths(panels: Panels, *, relative: bool = False) -> go.Figure:
    """Map of the path weight W(i, l): what a sublayer's output weighs in the input of a later one."""
    axes = {"rows": Axis("source i (0 = embedding, i = output of sublayer i − 1)", "source"), "columns": SUBLAYER}
    return maps.pair_map(_shown(panels, "paths", ("weight",)), **axes, name="path weight W(i, l)", fit_scale=True, relative=relative)


def transport_rank(panels: Panels, *, relative: bool = False) -> go.Figure:
    """Map of the effective rank of the residual mixing composed from boundary a to boundary b."""
    shown = _shown(panels, "transport", ("effective_rank",))
    return maps.pair_map(shown, **_FROM_TO, name="effective rank of the mixing", lowest=1.0, relative=relative)


def transport_overlap(panels: Panels, *, relative: bool = False) -> go.Figure:
    """Map of the mean |cosine| between the columns of the composed mixing."""
    shown = _shown(panels, "transport", ("column_cosine",))
    return maps.pair_map(shown, **_FROM_TO, name="mean |cosine| of columns", relative=relative)


def spectrum(rows: pd.DataFrame) -> pd.DataFrame:
    """The composed mixing's singular values over the distance b - a: one row per ``singular_value`` (1 = largest) and ``distance`` with
    the mean, least and largest ``value`` over the ``n`` pairs of boundaries that far apart."""
    taken = of_probe(rows, "transport")
    number = taken["metric"].str.extract(r"^singular_value_(\d+)$")[0]
    taken = taken.assign(singular_value=pd.to_numeric(number), distance=taken["j"].astype(float) - taken["i"].astype(float))
    taken = taken[number.notna() & np.isfinite(taken["value"].astype(float))]
    taken = taken.assign(singular_value=taken["singular_value"] + (1 - taken["singular_value"].min()))  # whether counted from 0 or from 1
    grouped = taken.groupby(["singular_value", "distance"])["value"].agg(["mean", "min", "max", "count"]).reset_index()
    names = {"mean": "value", "min": "value_min", "max": "value_max", "count": "n"}
    return grouped.rename(columns=names).astype({"singular_value": int, "distance": int})


def transport_spectrum(panels: Panels, *, colors: Colors = None) -> go.Figure:
    """Singular values of the composed mixing over the distance it spans: a line each, the largest the darkest, with a band from least to
    largest over the pairs of boundaries."""
    shown = _measured({title: spectrum(rows) for title, rows in panels.items()})
    colors = colors or dict(zip(shown, profiles.DISTINCT, strict=False))
    every = pd.concat(shown.values())[["value_min", "value_max"]].to_numpy().ravel()
    scale = scales.fitting(every)
    result = style.base_figure(height=profiles.ONE_ROW)
    for title, lines in shown.items():
        for number, line in lines.groupby("singular_value"):
            strength = max(0.35, 1 - 0.2 * (number - 1))
            edges = scale.place(np.concatenate([line["value_max"], line["value_min"][::-1]]))
            band = {"x": np.concatenate([line["distance"], line["distance"][::-1]]), "y": edges}
            result.add_scatter(**band, fill="toself", fillcolor=colors[title], opacity=0.13, mode="lines", line={"width": 0}, **_UNNAMED)
            result.add_scatter(
                x=line["distance"],
                y=scale.place(line["value"]),
                customdata=line["value"],
                mode="lines+markers",
                name=f"{title} · s{number}" if title else f"singular value {number}",
                opacity=strength,
                line={"color": colors[title], "width": 2, "dash": palette.DASHES[(number - 1) % len(palette.DASHES)]},
                marker={"size": 4},
                hovertemplate=f"<b>singular value {number}</b><br>over %{{x}} blocks: %{{customdata:.4g}}<extra></extra>",
            )
    result.update_xaxes(type="linear", title_text="distance b − a in blocks")
    ticks = scale.ticks(scale.place(every).min(), scale.place(every).max())
    result.update_yaxes(type="linear", title_text="singular value" + scale.note, rangemode="normal" if ticks else "tozero", **ticks)
    return result


def depth_weights(panels: Panels, *, relative: bool = False) -> go.Figure:
    """Map of the softmax weights over sources that each sublayer reads with; a dashed line ends the dead segment."""
    shown = _shown(panels, "transport", ("depth_weight",))
    dead = {title: value for title in shown if (value := single(panels[title], "transport", "dead_segment") or 0) > 0}
    marks = {title: 2 * blocks for title, blocks in dead.items()}
    axes = {"rows": Axis("source slot (0 = embedding)", "slot"), "columns": SUBLAYER}
    return maps.pair_map(shown, **axes, name="depth weight", square=False, fit_scale=True, marks=marks, relative=relative)


def running_weight(panels: Panels, *, relative: bool = False, colors: Colors = None) -> go.Figure:
    """The weight that each sublayer gives the running sum, and the line below which the sum is unread."""
    line = (DEAD_WEIGHT, f"unread below {DEAD_WEIGHT}")
    quantity = Quantity("running_weight", "weight of the running sum", reference=line, fit_scale=True)
    depth = Depth(SUBLAYER.title, "sublayer", relative=relative)
    return profiles.over_depth(_shown(panels, "transport", ("running_weight",)), [quantity], depth, colors=colors)


def norms(panels: Panels, *, relative: bool = False, colors: Colors = None) -> go.Figure:
    """Residual norm, cosine between neighbouring states and cosine with the embedding, over depth."""
    quantities = [
        Quantity("residual_norm", "‖z<sub>l</sub>‖ / √width", fit_scale=True),
        Quantity("cosine_next", "cos(z<sub>l</sub>, z<sub>l+1</sub>)"),
        Quantity("cosine_first", "cos(z<sub>0</sub>, z<sub>l</sub>)"),
    ]
    shown = _shown(panels, "norms", tuple(q.metric for q in quantities))
    return profiles.over_depth(shown, quantities, _states(relative), colors=colors)


def single(rows: pd.DataFrame, probe: str, metric: str) -> float | None:
    """A number without an index, such as a mean or a fraction; None where it was not measured."""
    found = of_probe(rows, probe, (metric,))["value"]
    return float(found.iloc[0]) if len(found) else None


_UNNAMED = {"hoverinfo": "skip", "showlegend": False}
_FROM_TO = {"rows": Axis("from boundary a (0 = embedding)", "boundary"), "columns": Axis("to boundary b", "boundary")}


def _states(relative: bool) -> Depth:
    return Depth(STATES.title, STATES.word, states=True, relative=relative)


def _shown(panels: Panels, probe: str, metrics: tuple[str, ...]) -> Panels:
    return _measured({title: of_probe(rows, probe, metrics) for title, rows in panels.items()})


def _measured(panels: Panels) -> Panels:
    measured = {title: rows for title, rows in panels.items() if len(rows)}
    if not measured:
        raise ValueError("none of the runs has anything to show in this figure")
    return measured


def _by_rule(panels: Panels) -> Panels:
    """The same, a panel for each skip rule, which its title names."""
    split = {}
    for title, rows in panels.items():
        for rule, of_rule in rows.groupby("rule", sort=False, dropna=False):
            named = f"skip rule: {rule}" if pd.notna(rule) else ""
            split[" · ".join(part for part in (title, named) if part)] = of_rule
    return split
