"""`depthbench runs`: list, show, compare, remove and seal runs."""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from pathlib import Path

from depthbench.errors import UserError
from depthbench.figures import designs
from depthbench.store.folder import list_run, run_folders
from depthbench.store.reader import Store
from depthbench.store.removal import bytes_of, remove_run, sweep, why_kept, why_locked
from depthbench.store.runs import find_run
from depthbench.store.seal import seal_run
from depthbench.verbs import _run_facts
from depthbench.verbs._run_table import FILTERS, add_filters, as_json, filtered, table
from depthbench.verbs._text import columns, counted, size

RUN_HELP = "a run id, a unique prefix of one, or a run folder"


def add_arguments(parser: ArgumentParser) -> None:
    """The verb's own arguments: one of five actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="{list,show,diff,rm,seal}")

    listing = actions.add_parser("list", help="which runs there are, and how they stand")
    add_filters(listing)
    listing.add_argument("--json", action="store_true", help="print every column as JSON")

    show = actions.add_parser("show", help="facts, attempts, what is stored, and configuration of one run")
    show.add_argument("run", metavar="RUN", help=RUN_HELP)

    diff = actions.add_parser("diff", help="in what two runs differ")
    diff.add_argument("run", nargs=2, metavar="RUN", help=RUN_HELP)

    rm = actions.add_parser("rm", help="remove runs, after a look at what would go", description="Remove the runs that are named, or that "
                            "pass the filters, or both where both are given. One that is being written is never removed.")  # fmt: skip
    rm.add_argument("run", nargs="*", metavar="RUN", help=RUN_HELP)
    add_filters(rm)
    rm.add_argument("--yes", action="store_true", help="do not ask")

    seal = actions.add_parser("seal", help="put the rows that a killed run left into its metrics.duckdb")
    seal.add_argument("run", nargs="*", metavar="RUN", help=RUN_HELP)
    seal.add_argument("--all", action="store_true", help="every run that is not sealed and not being written")


def run(args: Namespace) -> int:
    """Carry out one action. Returns the exit code; raises UserError for what the user can mend."""
    args.runs = Path(args.runs).expanduser()
    return {"list": _list, "show": _show, "diff": _diff, "rm": _rm, "seal": _seal}[args.action](args)


# Looking -------------------------------------------------------------------------------------------------------------------------


def _list(args: Namespace) -> int:
    every = Store(args.runs).runs()
    runs = filtered(every, args)
    if args.json:
        print(json.dumps([as_json(row) for row in runs.assign(design=designs.names(runs)).to_dict("records")], indent=2))
        return 0
    if runs.empty:
        print(f"none of {counted(len(every), 'run')} passes the filters" if len(every) else f"{args.runs} holds no runs yet")
        return 0
    print("\n".join(table(runs)))
    counts = runs["status"].value_counts()
    print(f"\n{counted(len(runs), 'run')}: {', '.join(f'{n} {status}' for status, n in counts.items())}")
    for problem in runs["problem"].dropna():
        print(problem)
    return 0


def _show(args: Namespace) -> int:
    print("\n".join(_run_facts.show(find_run(args.runs, args.run))))
    return 0


def _diff(args: Namespace) -> int:
    print("\n".join(_run_facts.diff(*(find_run(args.runs, ref) for ref in args.run))))
    return 0


# Removing ------------------------------------------------------------------------------------------------------------------------


def _rm(args: Namespace) -> int:
    chosen = chosen_for_removal(args)
    if not chosen:
        print("no run passes the filters; nothing is removed")
        return 0
    kept = {folder: why for folder, status in chosen.items() if (why := why_kept(folder, status))}
    going = [folder for folder in chosen if folder not in kept]
    for folder, why in kept.items():
        print(f"stays: {folder.name}: {why}")
    if not going:
        raise UserError("nothing can be removed now: every run that was chosen stays")
    sizes = {folder: bytes_of(folder) for folder in going}
    print("\n".join(columns([["run", "status", "on disk"], *([f.name, chosen[f], size(sizes[f])] for f in going)], right={2})), flush=True)
    total = f"{counted(len(going), 'run')}, {size(sum(sizes.values()))}"
    if not (args.yes or agreed(total)):
        print("nothing is removed")
        return 0
    for folder in going:
        remove_run(folder)
    for runs_dir in {folder.parent for folder in going}:
        sweep(runs_dir)
    print(f"removed: {total}")
    return 0


def chosen_for_removal(args: Namespace) -> dict[Path, str]:
    """Run folder -> status of what is named and passes the filters. Raises UserError where neither names nor filters are given."""
    by_filter = any(getattr(args, name) for name in FILTERS)
    if not (args.run or by_filter):
        raise UserError("which runs? name them, or give a filter, e.g. `depthbench runs rm --status failed`")
    named = [Path(os.path.abspath(find_run(args.runs, ref))) for ref in args.run]
    passing = {}
    for runs_dir in dict.fromkeys(folder.parent for folder in named) if named else [args.runs]:
        runs = filtered(Store(runs_dir).runs(), args)
        passing |= {runs_dir / run_id: status for run_id, status in zip(runs["run_id"], runs["status"], strict=True)}
    if not named:
        return passing
    unlisted = {} if by_filter else dict.fromkeys(named, "unreadable")  # a folder that lost its run's row can still be removed by name
    return {folder: status for folder, status in (unlisted | passing).items() if folder in named}


def agreed(what: str) -> bool:
    """Ask at the terminal. Raises UserError where nobody is there to answer."""
    if not sys.stdin.isatty():
        raise UserError(f"nothing is removed without a yes: repeat with --yes to remove {what}")
    try:
        return input(f"Remove {what}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False


# Sealing -------------------------------------------------------------------------------------------------------------------------


def _seal(args: Namespace) -> int:
    unsealed = [folder for folder in run_folders(args.runs) if list_run(folder).segments]
    if args.run and args.all:
        raise UserError("runs seal takes names or --all, not both")
    if not (args.run or args.all):
        found = ", ".join(folder.name for folder in unsealed[:5]) + (", ..." if len(unsealed) > 5 else "")
        raise UserError(f"which runs? name them, or give --all; not sealed: {found or 'none'}")
    if args.run:
        return seal_each(find_run(args.runs, ref) for ref in args.run)
    if not unsealed:
        print(f"every run in {args.runs} is sealed")
    busy = {folder: why for folder in unsealed if (why := why_locked(folder))}
    for why in busy.values():  # a run that goes on is sealed when it ends
        print(f"left as it is: {why}")
    return seal_each(folder for folder in unsealed if folder not in busy)


def seal_each(folders: Iterable[Path]) -> int:
    """Seal them and say of each what was done; one that cannot be does not keep the others from it. Raises UserError at the end then."""
    left = 0
    for folder in folders:
        try:
            done, problem = sealed(folder)
            left += problem is not None
            print(f"{folder.name}: {'; '.join(filter(None, (done, problem)))}", flush=True)
        except UserError as error:
            left += 1
            print(f"{folder.name}: left as it is: {error}", flush=True)
    if left:
        raise UserError(f"{counted(left, 'run')} not sealed: see above why")
    return 0


def sealed(folder: Path) -> tuple[str, str | None]:
    """Seal one run: what was done, in a few words, and what is damaged. Raises UserError where another process writes to it, or it cannot
    be read."""
    before = list_run(folder)
    problem = seal_run(folder)
    after = list_run(folder)
    gone = len(before.segments) - len(after.segments)
    if after.sealed != before.sealed:
        return f"sealed, {counted(gone, 'segment')} into metrics.duckdb ({size(after.sealed[2])})", problem
    return "was sealed; what a kill had left over is removed" if gone else "was sealed already", problem
