"""`depthbench archs`: the residual designs: how each updates its state, and what it adds to a shape."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from depthbench.errors import UserError
from depthbench.shapes import Shape, positive, size_named, solve_shape

COLUMNS = ("design", "family", "update", "weights", "reads", "adds", "source")


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of the verb."""
    parser.add_argument("--size", default="nano", help="parameter budget of the shape that additions are counted at (default: nano)")
    parser.add_argument("--ratio", help="its aspect ratio (default: the size's)")
    parser.add_argument("--arch", help="one design, with its options: a name, or your own my_module.MyDesign")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")


def run(args: Namespace) -> int:
    """Print a row for each design, or one design with its options. Returns the exit code; raises UserError for what cannot be."""
    from depthbench import residuals

    size = size_named(args.size)
    shape = solve_shape(size, None if args.ratio is None else positive("--ratio", args.ratio))
    if args.options and not args.arch:
        raise UserError(f"--arch.{next(iter(args.options))} needs --arch NAME, the design that it is an option of")
    names = [args.arch] if args.arch else residuals.names()
    rows = [describe(name, shape, args.options) for name in names]
    families = list(dict.fromkeys(row["family"] for row in rows))
    rows.sort(key=lambda row: families.index(row["family"]))
    if args.json:
        print(json.dumps(rows, indent=2, default=str))
        return 0
    print(f"added parameters are those at {size.name}, {shape.n_layer} layers x {shape.d_model}")
    print("x: the stream, F: attention or feed-forward, N: a norm, k: the sublayer and b: the block from 0, L: blocks\n")
    print("\n".join(_table(rows)))
    if args.arch:
        print("\n" + "\n".join(_options(rows[0])))
    else:
        print("\n`depthbench archs --arch NAME` lists a design's options; `--arch my_module.MyDesign` shows your own.")
    return 0


def describe(name: str, shape: Shape, given: dict) -> dict:
    """What there is to say of a design at a shape, with the options ``given``."""
    from depthbench import residuals
    from depthbench.nn.model import refuse_out_of_range

    design = residuals.get(name)
    values = residuals.checked_options(design, given)
    refuse_out_of_range(design, values, shape)
    known = residuals.options_of(design).values()
    return {
        "design": name,
        **design.about._asdict(),
        "params_extra": design.params_extra(shape, **values),
        "params_total": shape.params_total,
        "shape": asdict(shape),
        "options": [{"name": o.name, "value": values[o.name], "default": o.default, "accepts": o.accepts, "text": o.text} for o in known],
    }


def _table(rows: list[dict]) -> list[str]:
    shown = [{**row, "adds": _added(row)} for row in rows]
    cells = [COLUMNS, *([row[column] for column in COLUMNS] for row in shown)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def _added(row: dict) -> str:
    extra = row["params_extra"]
    return f"{extra:,} ({100 * extra / row['params_total']:.2f} %)" if extra else "0"


def _options(row: dict) -> list[str]:
    if not row["options"]:
        return ["it has no options"]
    flags = [f"--arch.{option['name']} {json.dumps(option['value'])}" for option in row["options"]]
    width = max(map(len, flags))
    return [f"{flag:<{width}}  {o['text'] or o['accepts']}" for flag, o in zip(flags, row["options"], strict=True)]
