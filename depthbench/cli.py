"""The command line: ``depthbench VERB …``. Each verb is a module of depthbench/verbs, imported only when it is called.

A verb module offers ``add_arguments(parser)`` and ``run(args)``, or ``main(argv)`` where it parses for itself. A UserError becomes
one line on standard error and exit code 2, and so does what a user's own design raises; Ctrl-C exit code 130.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from depthbench import __version__
from depthbench.errors import UserError, unknown

VERBS = {
    "fit": "train one run and record it",
    "resume": "go on with a run that was interrupted",
    "validate": "measure a run's validation loss again",
    "probe": "what does each layer do? run the layer probes on a run",
    "report": "a page on what each layer of a run does",
    "archs": "the residual designs, and what each adds",
    "check": "does a design keep the contract? also your own",
    "shapes": "the shapes of a parameter budget, and what they cost",
    "data": "prepare, verify and describe corpora",
    "runs": "list, show, compare, remove and seal runs",
    "export": "a run's weights as safetensors",
    "app": "look at your runs in a browser",
    "doctor": "what this machine offers, and what is to be mended",
}


class OneLineParser(argparse.ArgumentParser):
    """argparse with one-line errors."""

    def error(self, message: str):
        raise UserError(f"{message} (see `{self.prog} --help`)")


def overview() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {text}" for name, text in VERBS.items())
    return (
        "usage: depthbench VERB [options]\n\n"
        "Does depth pay? Trade width for depth at a fixed parameter budget, one residual design at a time.\n\n"
        f"verbs:\n{verbs}\n\n"
        "`depthbench VERB --help` explains one; every verb takes --runs DIR (default runs/).\n"
        "Start with: depthbench fit --arch pre_ln --ratio 32"
    )


def dispatch(argv: list[str]) -> int:
    verb, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if verb in ("-h", "--help"):
        print(overview())
        return 0
    if verb == "--version":
        print(f"depthbench {__version__}")
        return 0
    if verb not in VERBS:
        raise unknown("verb", verb, VERBS)
    module = import_module(f"depthbench.verbs.{verb}")
    if hasattr(module, "main"):
        return module.main(rest)
    parser = OneLineParser(prog=f"depthbench {verb}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = OneLineParser(prog=parser.prog, add_help=False, allow_abbrev=False)
    for taking in (parser, runs):
        taking.add_argument("--runs", default="runs", metavar="DIR", help="folder of all runs (default: runs)")
    module.add_arguments(parser)
    common, rest = runs.parse_known_args(rest)  # before the verb's own: it may stand anywhere, also after `data info`
    options, rest = design_options(rest)
    args = parser.parse_args(rest)
    if options and not hasattr(args, "arch"):
        raise UserError(f"`{parser.prog}` takes no design, and so no --arch.{next(iter(options))}")
    args.runs, args.options = common.runs, options
    return module.run(args)


def design_options(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """The options of a design, ``--arch.NAME VALUE`` or ``--arch.NAME=VALUE``, and the rest of the line."""
    options, rest, words = {}, [], iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if not flag.startswith("--arch."):
            rest.append(word)
            continue
        value = value if equals else next(words, None)
        if value is None:
            raise UserError(f"{flag} needs a value: {flag} VALUE")
        options[flag.removeprefix("--arch.").replace("-", "_")] = value
    return options, rest


def main(argv: list[str] | None = None) -> int:
    try:
        return dispatch(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        return refused(error)
    except KeyboardInterrupt:
        print("\ndepthbench: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0
    except Exception as error:
        from depthbench.residuals import fault_of_own

        if fault := fault_of_own(error):
            return refused(fault)
        raise


def refused(error: UserError) -> int:
    print(f"depthbench: {error}", file=sys.stderr)
    return 2
