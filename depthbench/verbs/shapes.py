"""`depthbench shapes`: the shapes of a size's budget, what they count and what they cost."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

from depthbench.errors import UserError
from depthbench.quantities import whole_number
from depthbench.shapes import (
    Shape,
    Size,
    flops_per_token_train,
    kv_cache_bytes,
    over_budget,
    positive,
    prefill_flops,
    size_named,
    solve_shape,
)


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of the verb. Values are checked in `run`, so that a wrong one is one line and not a usage text."""
    parser.add_argument("--size", default="nano", help="parameter budget and its recipe (default: nano)")
    parser.add_argument("--ratio", help="one aspect ratio d_model / n_layer (default: the size's ladder)")
    parser.add_argument("--budget", default="total", help="total, or backbone: embedding and head left out (default: total)")
    parser.add_argument("--tolerance", help="how far from the budget a shape may lie, as a fraction (default: the size's, mostly 0.035)")
    parser.add_argument("--seq-len", help="tokens that prefill and KV cache are for (default: the size's)")
    parser.add_argument("--arch", help="also count what this residual design adds; its options as --arch.NAME VALUE")
    parser.add_argument("--count-extras", action="store_true", help="solve with what --arch adds, instead of on the Pre-LN count")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")


def run(args: Namespace) -> int:
    """Print the ladder of a size, or the one row of ``--ratio``. Returns the exit code; raises UserError for what cannot be."""
    question = _question(args)
    rows, unreachable = [], []
    for ratio in [positive("--ratio", args.ratio)] if args.ratio is not None else question.size.ladder(args.budget):
        try:
            rows.append(question.row(ratio))
        except UserError as error:  # one rung that a tolerance or a design puts out of reach does not hide the others
            unreachable.append(error)
    if not rows:
        raise unreachable[0]
    print(json.dumps(rows, indent=2) if args.json else _page(question, rows, one=args.ratio is not None))
    for error in unreachable:
        print(f"left out: {error}", file=sys.stderr)
    return 0


@dataclass(frozen=True)
class _Question:
    """What is asked of every ratio."""

    size: Size
    budget: str
    tolerance: float | None
    seq_len: int
    arch: str | None
    extra: Callable[[Shape], int]  # parameters that the design adds
    extra_flops: Callable[[Shape, int], int]  # and FLOPs of a forward pass over so many tokens
    count_extras: bool

    def row(self, ratio: float) -> dict:
        shape = solve_shape(self.size, ratio, self.budget, self.tolerance, self.extra if self.count_extras else None)
        extra, target = self.extra(shape), self.size.budgets[self.budget]
        trained = self.size.seq_len
        per_token = flops_per_token_train(shape, trained) + 3 * self.extra_flops(shape, trained) // trained
        return {
            "size": self.size.name,
            "arch": self.arch,
            **asdict(shape),
            "ratio": shape.ratio,
            "ratio_requested": ratio,
            "ratio_deviation": shape.ratio / ratio - 1,
            "params_total": shape.params_total + extra,
            "params_backbone": shape.params_backbone + extra,
            "params_extra": extra,
            "budget": self.budget,
            "budget_params": target,
            "budget_deviation": (shape.params(self.budget) + extra) / target - 1,
            "over_budget": over_budget(shape, self.size, extra, self.budget, self.tolerance),
            "train_tokens": self.size.tokens,
            "train_seq_len": self.size.seq_len,
            "train_flops_per_token": per_token,
            "train_flops": per_token * self.size.tokens,
            "seq_len": self.seq_len,
            "prefill_flops": prefill_flops(shape, self.seq_len) + self.extra_flops(shape, self.seq_len),
            "kv_cache_bytes": kv_cache_bytes(shape, self.seq_len),
        }


def _question(args: Namespace) -> _Question:
    size = size_named(args.size)
    tolerance = None if args.tolerance is None else positive("--tolerance", args.tolerance)
    seq_len = size.seq_len if args.seq_len is None else whole_number(args.seq_len, "--seq-len")
    positive("--seq-len", seq_len)
    if args.count_extras and args.arch is None:
        raise UserError("--count-extras needs --arch NAME: it counts what that design adds")
    if args.options and args.arch is None:
        raise UserError(f"--arch.{next(iter(args.options))} needs --arch NAME, the design that it is an option of")
    return _Question(size, args.budget, tolerance, seq_len, args.arch, *_extras(args.arch, args.options, size), args.count_extras)


def _extras(arch: str | None, given: dict, size: Size) -> tuple[Callable, Callable]:
    """What a design adds to a shape, parameters and FLOPs; without a design nothing, and torch stays unimported."""
    if arch is None:
        return lambda shape: 0, lambda shape, seq_len: 0
    from depthbench import residuals
    from depthbench.nn.model import refuse_out_of_range

    design = residuals.get(arch)
    options = residuals.checked_options(design, given)
    refuse_out_of_range(design, options, size.shape(*size.base))
    return partial(design.params_extra, **options), partial(design.flops_extra, **options)


_COUNTS = ("", "k", "M", "B", "T", "Q")
_FLOPS = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")

_COLUMNS: dict[str, Callable[[dict], str]] = {
    "n_layer": lambda row: str(row["n_layer"]),
    "d_model": lambda row: str(row["d_model"]),
    "heads": lambda row: str(row["n_head"]) + ("" if row["n_kv_head"] == row["n_head"] else f"/{row['n_kv_head']}"),
    "head_dim": lambda row: str(row["head_dim"]),
    "d_ff": lambda row: str(row["d_ff"]),
    "ratio": lambda row: f"{row['ratio']:.2f}",
    "total": lambda row: _human(row["params_total"]),
    "backbone": lambda row: _human(row["params_backbone"]),
    "extra": lambda row: _human(row["params_extra"]),
    "off budget": lambda row: f"{100 * row['budget_deviation']:+.1f} %" + (" !" if row["over_budget"] else "  "),
    "train FLOP": lambda row: _human(row["train_flops"], _FLOPS),
    "prefill FLOP": lambda row: _human(row["prefill_flops"], _FLOPS),
    "KV cache": lambda row: _human(row["kv_cache_bytes"], _BYTES, step=1024),
}


def _page(question: _Question, rows: list[dict], *, one: bool) -> str:
    first = rows[0]
    counted = f"{question.size.name}: {first['budget_params']:,} parameters ({question.budget}), vocabulary {first['vocab_size']:,}"
    trained = f"trained on {_human(first['train_tokens'])} tokens; prefill and 16-bit KV cache of {question.seq_len:,} tokens"
    lines = [f"{counted}; {trained}", "", *_table([name for name in _COLUMNS if name != "extra" or question.arch], rows)]
    if one:
        lines += ["", f"asked for ratio {first['ratio_requested']:g}, got {first['ratio']:.2f} ({100 * first['ratio_deviation']:+.1f} %)"]
    if question.arch:
        lines += ["", f"parameters and FLOPs include what {question.arch} adds"]
    if any(row["over_budget"] for row in rows):
        lines.append("! over the budget by more than the tolerance; --count-extras solves with what the design adds")
    return "\n".join(lines)


def _table(names: list[str], rows: list[dict]) -> list[str]:
    cells = [names, *([_COLUMNS[name](row) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def _human(value: float, units: tuple[str, ...] = _COUNTS, step: int = 1000) -> str:
    """Three significant digits and a unit: 405406720 is "405 M"."""
    power = 0
    while float(f"{value:.3g}") >= 1000 and power < len(units) - 1:
        value, power = value / step, power + 1
    digits = f"{value:#.3g}".rstrip(".") if power else str(value)
    return f"{digits} {units[power]}".rstrip()
