"""`depthbench check ARCH`: does a residual design keep the contract? For the ten that ship, and for your own: my_module.MyDesign.

Each check builds tiny models on the CPU and holds one thing: causality, gradients, states, skipping and swapping, compilation, bf16, two
processes. It takes seconds. Options of the design: --arch.NAME VALUE.
"""

from __future__ import annotations

import os
import time
import traceback
from argparse import ArgumentParser, Namespace

from depthbench.errors import UserError


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of the verb."""
    parser.add_argument("arch", metavar="ARCH", help="a design's name, or your own my_module.MyDesign")
    parser.add_argument("--only", metavar="NAME[,NAME]", help="these checks alone")
    parser.add_argument("--traceback", action="store_true", help="show the whole traceback of what a check raised")


def run(args: Namespace) -> int:
    """Print a line for each check as it is done. Returns 0 where all hold, 1 where one fails; raises UserError for what cannot be."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported: on models this small, threads only wait for each other

    from depthbench import contract, residuals
    from depthbench.contract.suite import FAILED, NOT_DEFINED, OK

    design = imported(args.arch, keep_traceback=args.traceback)
    options = residuals.checked_options(design, args.options)
    only = [name.strip() for name in args.only.split(",")] if args.only else []

    began, group, said, verdicts = time.perf_counter(), "", "", []
    for outcome in contract.outcomes(design, only=only, **options):
        if outcome.group != group:
            group = outcome.group
            print(group)
        again = outcome.message == said != ""
        print(f"  {outcome.verdict:<11}  {outcome.check}{again * ', as above'}", flush=True)
        if outcome.message and not again:
            said = outcome.message
            shown = outcome.traceback if args.traceback else said
            print("\n".join(f"               {line}" for line in (shown or said).splitlines()))
        verdicts.append(outcome.verdict)
    failed, undefined = verdicts.count(FAILED), verdicts.count(NOT_DEFINED)
    counts = f"{verdicts.count(OK)} ok, {failed} failed" + (f", {undefined} not defined" if undefined else "")
    written = "".join(f" --arch.{name} {value}" for name, value in residuals.chosen_options(design, options).items())
    print(f"\n{args.arch}{written}: {counts} ({time.perf_counter() - began:.0f} s)")
    return 1 if failed else 0


def imported(arch: str, *, keep_traceback: bool) -> type:
    """The design's class. Of a fault in the user's module the command line says the place; ``keep_traceback`` shows all of it before."""
    from depthbench import residuals

    try:
        return residuals.get(arch)
    except UserError:
        raise
    except Exception:
        if keep_traceback:
            traceback.print_exc()
        raise
