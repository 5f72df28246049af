"""`depthbench report RUN`: one HTML page on what each layer of a run does, from what `depthbench probe RUN` measured.

The page holds all it needs and loads nothing. Beside it, in a folder of the same name, lie a CSV of exactly what each figure shows and,
where kaleido and a browser are installed, a PNG.
"""

from __future__ import annotations

import os
import shlex
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from depthbench.errors import UserError
from depthbench.figures import catalogue, report
from depthbench.figures.designs import option_text
from depthbench.store.disk import WRITE_ERRORS, replacing
from depthbench.store.reader import Store, read_run
from depthbench.store.runs import find_run

PNG_WIDTH, PNG_SCALE = 1000, 2
PNG_TIMEOUT_S = 90


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of the verb."""
    parser.add_argument("run", metavar="RUN", help="a run id, a unique prefix of one, or a run folder")
    parser.add_argument("--out", metavar="FILE.html", help="where the page goes (default: report.html in the run's folder)")
    parser.add_argument("--step", type=int, metavar="N", help="what was measured at this step (default: the last that was)")
    parser.add_argument("--no-png", action="store_true", help="write no PNG, only the page and the tables")


def run(args: Namespace) -> int:
    """Write the page, tables and pictures. Returns the exit code; raises UserError for what cannot be."""
    folder = find_run(Path(args.runs), args.run)
    out = place(args.out, folder)
    store, facts = Store(folder.parent), read_run(folder)
    rows = at_step(store.probes([folder.name]), folder.name, args.step)
    parts, numbers = report.sections(rows, facts["arch"]), report.numbers(rows, facts["arch"])
    drawn = [one for part in parts for one in part.drawn]
    files = out.with_suffix("")
    try:
        files.mkdir(parents=True, exist_ok=True)
        clear(files)
        write_tables(files, {one.drawing.name: one.table for one in drawn} | {"numbers": numbers.drop(columns="shown")})
        no_pictures = "--no-png" if args.no_png else write_pictures(files, drawn, folder.name)
        scalars = store.scalars([folder.name], ["train/loss", "val/loss"])
        with replacing(out) as unfinished:
            text = report.page(header(folder, facts, scalars, rows, links(out, files, drawn)), parts, numbers)
            unfinished.write_text(text, encoding="utf-8")
    except WRITE_ERRORS as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write the report to {out}: {reason}; mend that, or choose another place with --out FILE.html") from None
    print(f"{out}: {len(drawn)} figures of {len(parts)} probes at step {rows['step'].iloc[0]:,}")
    print(f"{files}{os.sep}: their tables (CSV){'' if no_pictures else ' and pictures (PNG)'}")
    if no_pictures and not args.no_png:
        print(f"no pictures: {no_pictures}")
    if missing := [probe.name for probe in catalogue.PROBES if probe.name not in set(rows["probe"])]:
        print(f"not measured: {', '.join(missing)}; measure with `{probe_command(folder)} --probes {','.join(missing)}`")
    return 0


def place(out: str | None, folder: Path) -> Path:
    """The page's path. Raises UserError where it is no name of an HTML file."""
    path = folder / "report.html" if out is None else Path(out).expanduser()
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir():
        raise UserError(f"--out {out} is no HTML file: give a name that ends in .html")
    if path.with_suffix("").exists() and not path.with_suffix("").is_dir():
        raise UserError(f"{path.with_suffix('')} is a file, and the tables need a folder of that name: give another --out")
    return path


def at_step(rows: pd.DataFrame, run_id: str, step: int | None) -> pd.DataFrame:
    """The rows of one step, the last that anything was measured at by default. Raises UserError where there are none."""
    steps = sorted(int(at) for at in rows["step"].dropna().unique())
    if not steps:
        raise UserError(f"run {run_id} has nothing to report yet: measure its layers with `depthbench probe {run_id}`")
    if step is not None and step not in steps:
        raise UserError(f"run {run_id} was not probed at step {step}; it was at {', '.join(map(str, steps))}")
    return rows[rows["step"] == (steps[-1] if step is None else step)]


# What the page says of the run ---------------------------------------------------------------------------------------------------


def header(folder: Path, run: dict, scalars: pd.DataFrame, rows: pd.DataFrame, linked: dict) -> report.Header:
    """``run``: columns of table ``run``; ``scalars``: its losses; ``rows``: its probes at one step."""
    design = " ".join(filter(None, (run["arch"], option_text(run.get("options")))))
    return report.Header(
        title=f"{design}, {run['n_layer']} blocks of width {run['d_model']}",
        run_id=folder.name,
        facts={name: text for name, text in run_facts(design, run, scalars, rows).items() if text},
        repeat=repeating(folder, rows),
        missing=f"{probe_command(folder)} --step {rows['step'].iloc[0]:.0f}",
        links=linked,
    )


def run_facts(design: str, run: dict, scalars: pd.DataFrame, rows: pd.DataFrame) -> dict[str, str]:
    """What a reader must know to compare the figures with others. What an old run did not record is left out."""

    def text(template: str, *names: str) -> str:
        return template.format(*(run[name] for name in names)) if all(run.get(name) is not None for name in names) else ""

    def together(*texts: str) -> str:
        return ", ".join(filter(None, texts))

    asked = text(" ({:g} asked for)", "ratio_requested") if run.get("ratio_requested") != run.get("ratio") else ""
    at = rows.iloc[0]
    return {
        "design": design,
        "shape": together(
            f"{run['n_layer']} blocks × {run['d_model']}",
            text("{} heads of {}", "n_head", "head_dim"),
            text("d_ff {}", "d_ff"),
            text("vocabulary {:,}", "vocab_size"),
        ),
        "aspect ratio": text("{:.2f} = d_model / n_layer", "ratio") + asked,
        "parameters": together(
            text("{:,}", "params_total"), text("{:,} in the backbone", "params_backbone"), text("{:,} the design's own", "params_extra")
        ),
        "corpus": together(text("{}", "corpus"), text("tokenizer {}", "tokenizer")),
        "training": together(
            text("{:,} tokens planned", "tokens_planned"),
            text("batch of {:,}", "batch_tokens"),
            text("length {:,}", "seq_len"),
            text("learning rate {:g}", "lr"),
            text("seed {}", "seed"),
            text("{}", "precision"),
            text("recipe {}", "recipe"),
        ),
        "validation loss": loss_text(scalars, "val/loss"),
        "training loss": loss_text(scalars, "train/loss"),
        "status": run["status"] if run["status"] != "finished" else "",
        "probed": together(f"at step {at['step']:,.0f}", f"after {at['tokens']:,.0f} tokens" if pd.notna(at["tokens"]) else ""),
        "held-out text": together(windows_text(rows), probed_loss(rows)),
        "skip rules": ", ".join(rows["rule"].dropna().unique()),
        "made by": together(text("depthbench {}", "version"), text("commit {:.10}", "git_commit")),
    }


def loss_text(scalars: pd.DataFrame, name: str) -> str:
    """The last value of a loss, and the best of a validation loss where that came earlier."""
    values = scalars[scalars["name"] == name]
    if values.empty:
        return ""
    last = values.iloc[-1]
    best = values.loc[values["value"].idxmin()] if name == "val/loss" and values["value"].notna().any() else last
    earlier = f" (best {best['value']:.4f}, at step {best['step']:,.0f})" if best["value"] < last["value"] else ""
    return f"{last['value']:.4f} nats per token at step {last['step']:,.0f}{earlier}"


def windows_text(rows: pd.DataFrame) -> str:
    """On how many windows and tokens the probes looked; which ones, where not all on the same."""
    groups = by_windows(rows)
    several = len(groups) > 1
    return "; ".join(
        f"{windows:,} windows of {length:,} tokens, {windows * length:,} in all" + (f" ({', '.join(probes)})" if several else "")
        for (windows, length), probes in groups.items()
    )


def probed_loss(rows: pd.DataFrame) -> str:
    """The model's own loss on the windows, where a probe says it."""
    losses = rows[(rows["metric"] == "loss") & (rows["status"] == "ok")].sort_values("i")  # of the logit lens: the last state's
    return f"loss {losses['value'].iloc[-1]:.4f}" if len(losses) else ""


def by_windows(rows: pd.DataFrame) -> dict[tuple[int, int], list[str]]:
    """(windows, tokens in each) -> the probes that were measured on them."""
    known = rows.dropna(subset=["windows", "length"])
    grouped = known.groupby(["windows", "length"])["probe"].unique()
    return {(int(windows), int(length)): list(probes) for (windows, length), probes in grouped.items()}


def probe_command(folder: Path) -> str:
    return f"depthbench probe {folder.name}{'' if folder.parent == Path('runs') else f' --runs {shlex.quote(str(folder.parent))}'}"


def repeating(folder: Path, rows: pd.DataFrame) -> list[str]:
    """The commands that train the run again and measure the same, on the same windows."""
    groups = by_windows(rows)
    step = f"--step {rows['step'].iloc[0]:.0f}"
    everything = {probe.name for probe in catalogue.PROBES}
    commands = [f"depthbench fit --config {shlex.quote(str(folder / 'config.yaml'))}"]
    for (windows, length), probes in groups.items():
        named = "" if set(probes) == everything else f" --probes {','.join(probes)}"
        commands.append(f"{probe_command(folder)} {step} --windows {windows} --length {length}{named}")
    return commands


# Files beside the page -----------------------------------------------------------------------------------------------------------


def clear(files: Path) -> None:
    """Remove the tables and pictures of an earlier report, and nothing else that may lie there."""
    names = ["numbers", *(drawing.name for probe in catalogue.PROBES for drawing in probe.drawings)]
    for path in (files / f"{name}.{kind}" for name in names for kind in ("csv", "png")):
        path.unlink(missing_ok=True)


def write_tables(files: Path, tables: dict[str, pd.DataFrame]) -> None:
    for name, table in tables.items():
        with replacing(files / f"{name}.csv") as unfinished:
            table.to_csv(unfinished, index=False)


def write_pictures(files: Path, drawn: Iterable[report.Drawn], run_id: str) -> str | None:
    """A PNG of every figure; or why this machine can make none, in a line."""
    try:
        import kaleido
    except ImportError:
        return "kaleido is not installed (pip install 'kaleido>=1'); every figure of the page saves itself as PNG by its camera button"
    if not hasattr(kaleido, "write_fig_from_object_sync"):
        return "this kaleido is too old (pip install --upgrade 'kaleido>=1')"
    wanted = []
    for one in drawn:
        size = {"width": one.figure.layout.width or PNG_WIDTH, "height": one.figure.layout.height + 40}
        opts = {"format": "png", "scale": PNG_SCALE, **size}
        wanted.append({"fig": report.on_paper(one, run_id).to_plotly_json(), "path": str(files / f"{one.drawing.name}.png"), "opts": opts})
    try:  # no MathJax: it would be fetched from the network
        errors = kaleido.write_fig_from_object_sync(wanted, kopts={"mathjax": False, "timeout": PNG_TIMEOUT_S})
    except Exception as error:  # a browser fails in as many ways as there are machines; the page does not depend on it
        errors = (error,)
    return f"the browser gave none ({' '.join(str(errors[0]).split())[:120] or type(errors[0]).__name__})" if errors else None


def links(out: Path, files: Path, drawn: Iterable[report.Drawn]) -> dict[str, dict[str, str]]:
    """Figure -> format -> address beside the page, of the files that are there."""
    found = {}
    for one in drawn:
        paths = {kind: files / f"{one.drawing.name}.{kind.lower()}" for kind in ("CSV", "PNG")}
        found[one.drawing.name] = {kind: path.relative_to(out.parent).as_posix() for kind, path in paths.items() if path.exists()}
    return found
