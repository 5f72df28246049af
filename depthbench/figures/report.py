"""One HTML page on what the layers of a run do: all that a reader needs is inside it, and it loads nothing.

`sections` draws a run's probe rows of one step, `page` puts them into the page. Files are the caller's affair.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from depthbench.figures import catalogue, palette, style
from depthbench.figures.probes import CAUSAL_THRESHOLD, PERMUTATION_THRESHOLD, USEFUL_RATIO
from depthbench.resources import resource

# Numbers without an index, as a table: probe, metric, what to call it, and how it is written.
NUMBERS = (
    ("causal", "late_fraction", f"late pairs with a causal score above {CAUSAL_THRESHOLD}", "{:.1%}"),
    ("causal", "mean", "mean causal score, over √L", "{:.4f}"),
    ("permutation", "late_fraction", f"late pairs with a permutation score above {PERMUTATION_THRESHOLD}", "{:.1%}"),
    ("permutation", "mean", "mean permutation score", "{:.4f}"),
    ("usefulness", "useful_fraction", f"blocks with a usefulness ratio above {USEFUL_RATIO}", "{:.1%}"),
    ("transport", "dead_segment", "first blocks that do not read the running sum", "{:.0f}"),
)
_PAPER = "late_layer_pairs_above_threshold_L32"


@dataclass(frozen=True)
class Drawn:
    """A figure and the table of exactly what it shows."""

    drawing: catalogue.Drawing
    figure: go.Figure
    table: pd.DataFrame
    title: str
    reading: str


@dataclass(frozen=True)
class Section:
    """What a probe gave: its figures, why something is not defined, and remarks on what was measured."""

    probe: catalogue.Probe
    drawn: list[Drawn]
    reasons: list[str]
    remarks: list[str]


@dataclass(frozen=True)
class Header:
    """What the page says of the run: ``facts`` (name -> text), and the commands that repeat it."""

    title: str
    run_id: str
    facts: dict[str, str]
    repeat: Sequence[str]
    missing: str  # the command that measures what was not, without the names of the probes
    links: dict[str, dict[str, str]] = field(default_factory=dict)  # figure -> format -> relative address


def sections(rows: pd.DataFrame, arch: str) -> list[Section]:
    """Every probe that was measured, in the order of the catalogue. ``rows``: a run's rows of one step."""
    found = []
    for probe in catalogue.PROBES:
        own = rows[rows["probe"] == probe.name]
        if len(own):
            drawn = [d for drawing in probe.drawings if (d := _drawn(probe, drawing, own, arch))]
            reasons = list(dict.fromkeys(own.loc[own["status"] == "not_defined", "note"].fillna("it has no meaning for this design")))
            found.append(Section(probe, drawn, reasons, _remarks(own)))
    return found


def _drawn(probe: catalogue.Probe, drawing: catalogue.Drawing, rows: pd.DataFrame, arch: str) -> Drawn | None:
    table = probe.table(drawing, rows)
    if table.empty:
        return None
    colored = {} if drawing.draw.__kwdefaults__.get("colors", False) is False else {"colors": {"": palette.color(arch)}}
    rules = [str(rule) for rule in table["rule"].dropna().unique()] if "rule" in table else []
    rule = f" (skip rule{'s' if len(rules) > 1 else ''}: {', '.join(rules)})" if rules else ""
    values = table["value"].unique()
    reading = drawing.reading + (f" Here all values are {values[0]:g}." if len(values) == 1 and len(table) > 1 else "")
    return Drawn(drawing, drawing.draw({"": rows}, **colored), table, drawing.title + rule, reading)


def _remarks(rows: pd.DataFrame) -> list[str]:
    counts = sorted({int(n) for n in rows["n_tokens"].dropna()})
    remarks = [" and ".join(f"{n:,}" for n in counts) + " tokens"] if counts else []
    zeros = rows.loc[(rows["metric"] == "zero_vectors") & (rows["value"] > 0), "value"]
    if len(zeros):
        remarks.append(f"{zeros.sum():,.0f} zero vectors have no angle and were left out")
    lost = int((rows["status"].eq("ok") & ~np.isfinite(rows["value"].astype(float))).sum())
    if lost:
        remarks.append(f"{lost:,} of {len(rows):,} values are not finite")
    return remarks + list(rows.loc[rows["status"] == "ok", "note"].dropna().unique())


def numbers(rows: pd.DataFrame, arch: str) -> pd.DataFrame:
    """The numbers of NUMBERS that were measured: ``probe``, ``metric``, ``measure``, ``rule``, ``value``, ``shown`` and ``paper``.

    ``paper``: of the same design at 400M parameters and 32 layers, where the paper has it; else NaN.
    """
    published = json.loads(resource("conf", "paper.json").read_text(encoding="utf-8"))[_PAPER]
    found = []
    for probe, metric, measure, how in NUMBERS:
        own = rows[(rows["probe"] == probe) & (rows["metric"] == metric) & (rows["status"] == "ok")]
        for value, rule in zip(own["value"].astype(float), own["rule"], strict=True):
            paper = published.get(probe, {}).get(arch, np.nan) if metric == "late_fraction" else np.nan
            shown = how.format(value) if np.isfinite(value) else "–"
            found.append((probe, metric, measure, rule if pd.notna(rule) else "", value, shown, paper))
    return pd.DataFrame(found, columns=["probe", "metric", "measure", "rule", "value", "shown", "paper"])


def on_paper(drawn: Drawn, run_id: str) -> go.Figure:
    """The figure as a picture of its own: on white, with its title and the run's name."""
    figure = go.Figure(drawn.figure)
    top = (figure.layout.margin.t or 32) + 40
    title = {"text": f"{drawn.title}<br><sub>{escape(run_id)}</sub>", "x": 0.01, "xanchor": "left", "font": {"size": 15}}
    figure.update_layout(title=title, margin={"t": top}, paper_bgcolor="white", plot_bgcolor="white", font={"color": "#1c232c"})
    return figure


def page(header: Header, parts: list[Section], summary: pd.DataFrame) -> str:
    """The page as text. ``parts``: of `sections`; ``summary``: of `numbers`."""
    there = {part.probe.name for part in parts}
    missing = [probe for probe in catalogue.PROBES if probe.name not in there]
    figures = [drawn for part in parts for drawn in part.drawn]
    data = "\n".join(_data(drawn) for drawn in figures)
    body = [_head(header), _numbers(summary), _contents(parts, missing), *(_section(part, header.links) for part in parts)]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(header.run_id)}: what each layer does</title>
<style>
{_shipped("report.css")}</style>
</head>
<body>
<main>
{chr(10).join(filter(None, body))}
{_missing(missing, header.missing)}
</main>
{data}
<script>{get_plotlyjs()}</script>
<script>window.REPORT_CONFIG = {json.dumps(style.CONFIG)};</script>
<script>
{_shipped("report.js")}</script>
</body>
</html>
"""


def _shipped(name: str) -> str:
    return resource("figures", name).read_text(encoding="utf-8")


def _head(header: Header) -> str:
    facts = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in header.facts.items())
    commands = escape("\n".join(header.repeat))
    return f"""<header>
<h1>{escape(header.title)}</h1>
<p class="lead run">What each layer does · run {escape(header.run_id)}</p>
<dl>
{facts}
</dl>
<p class="quiet">To repeat the run and the probes (what is there already is not done again; <code>--fresh</code> does it again):</p>
<pre>{commands}</pre>
</header>"""


def _numbers(summary: pd.DataFrame) -> str:
    if summary.empty:
        return ""
    by_rule, paper = summary["rule"].ne("").any(), summary["paper"].notna().any()
    heads = ["", *(["skip rule"] if by_rule else []), "this run", *(["paper, 400M at 32 layers"] if paper else [])]
    lines = []
    for row in summary.itertuples():
        cells = [f"<td>{escape(row.rule) or '–'}</td>"] if by_rule else []
        cells.append(f'<td class="number">{escape(row.shown)}</td>')
        cells += [f'<td class="number">{f"{row.paper:.0%}" if pd.notna(row.paper) else "–"}</td>'] if paper else []
        lines.append(f'<tr><th scope="row">{escape(row.measure)}</th>{"".join(cells)}</tr>')
    top = "".join(f'<th scope="col"{" class=number" if i >= len(heads) - 1 - paper else ""}>{head}</th>' for i, head in enumerate(heads))
    return f"""<table>
<caption>In numbers. Late pairs: both blocks in the last three quarters of the network (index ≥ L/4).</caption>
<thead><tr>{top}</tr></thead>
<tbody>
{chr(10).join(lines)}
</tbody>
</table>"""


def _contents(parts: list[Section], missing: list[catalogue.Probe]) -> str:
    lines = []
    for part in parts:
        undefined = "" if part.drawn else ' <span class="quiet">not defined</span>'
        lines.append(f'<li><a href="#{part.probe.name}">{escape(part.probe.title)}</a>{undefined}</li>')
    if missing:
        lines.append(f'<li><a href="#missing">Not measured</a> <span class="quiet">{len(missing)}</span></li>')
    return f'<nav aria-label="Contents"><b>Contents</b>\n<ol>\n{chr(10).join(lines)}\n</ol></nav>'


def _section(part: Section, links: dict[str, dict[str, str]]) -> str:
    probe = part.probe
    blocks = [f'<p class="definition"><b>Definition.</b> {probe.definition}</p>']
    blocks += [f"<p><b>Not defined:</b> {escape(reason)}.</p>" for reason in (text.rstrip(".") for text in part.reasons)]
    if part.drawn and part.remarks:
        blocks.append(f'<p class="quiet">Measured on {escape("; ".join(part.remarks))}.</p>')
    blocks += [_figure(drawn, links.get(drawn.drawing.name, {})) for drawn in part.drawn]
    return f'<section id="{probe.name}">\n<h2>{escape(probe.title)}</h2>\n{chr(10).join(blocks)}\n</section>'


def _figure(drawn: Drawn, links: dict[str, str]) -> str:
    name, height = drawn.drawing.name, int(drawn.figure.layout.height)
    files = " · ".join(f'<a href="{escape(address)}" download>{kind}</a>' for kind, address in links.items())
    return f"""<figure>
<h3>{escape(drawn.title)}</h3>
<p>{escape(drawn.reading)}</p>
<div class="plot" id="figure-{name}" role="img" aria-label="{escape(drawn.title)}" style="min-height: {height}px"></div>
<figcaption>{files}</figcaption>
</figure>"""


def _data(drawn: Drawn) -> str:
    text = drawn.figure.to_json().replace("</", "<\\/")  # or a title could end the script
    return f'<script type="application/json" id="figure-{drawn.drawing.name}-data">{text}</script>'


def _missing(missing: list[catalogue.Probe], command: str) -> str:
    if not missing:
        return ""
    items = "\n".join(f"<li>{escape(drawing.title)}</li>" for probe in missing for drawing in probe.drawings)
    full = escape(f"{command} --probes {','.join(probe.name for probe in missing)}")
    return f"""<section id="missing">
<h2>Not measured</h2>
<p>These figures are missing; the command below measures what they need, and the report can be made again after it.</p>
<ul>
{items}
</ul>
<pre>{full}</pre>
</section>"""
