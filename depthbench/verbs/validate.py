"""`depthbench validate RUN`: the validation loss of a run's newest checkpoint, measured again."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run id, a unique prefix of one, or a run folder")


def run(args: argparse.Namespace) -> int:
    from depthbench.training.fit import quieten
    from depthbench.training.runs import validate

    quieten()
    metrics = validate(args.run, runs=args.runs)
    print(f"validation loss {metrics['val/loss']:.6f} nats per token, perplexity {metrics['val/perplexity']:.3f}")
    return 0
