"""``depthbench fit``: train one run. LightningCLI parses the arguments, see depthbench/training/cli.py."""

from __future__ import annotations


def main(argv: list[str]) -> int:
    from depthbench.training.cli import parse
    from depthbench.training.fit import fit

    return fit(parse(argv))
