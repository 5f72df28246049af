"""`depthbench resume RUN`: go on with a run from its newest whole checkpoint, as it was begun."""

from __future__ import annotations

import json
from pathlib import Path

from depthbench.cli import OneLineParser
from depthbench.errors import UserError


def main(argv: list[str]) -> int:
    import yaml

    from depthbench.store.reader import read_run
    from depthbench.store.runs import find_run
    from depthbench.training.cli import parse
    from depthbench.training.fit import fit

    parser = OneLineParser(
        prog="depthbench resume",
        description="Go on with a run from its newest whole checkpoint. It needs nothing but the run; what the run is cannot be changed.",
        epilog="Keys of `depthbench fit` that decide no result may follow, such as --workers 2 or --trainer.max_time 00:08:00:00.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a run id, a unique prefix of one, or a run folder")
    parser.add_argument("--runs", default="runs", metavar="DIR", help="folder of all runs (default: runs)")
    args, rest = parser.parse_known_args(argv)
    folder = find_run(Path(args.runs).expanduser(), args.run)
    config = folder / "config.yaml"
    try:
        keys = leaves(yaml.safe_load(config.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"run {folder.name} has no readable config.yaml: repeat the `depthbench fit` that began it") from error
    recorded = leaves(json.loads(read_run(folder)["config"])["command"])
    if lacking := sorted(recorded - keys):
        lacks = f"{lacking[0]}{f' and {len(lacking) - 1} more' if lacking[1:] else ''}"
        raise UserError(f"the config.yaml of run {folder.name} is not whole, it lacks {lacks}: repeat the `depthbench fit` that began it")
    return fit(parse(["--config", str(config), *rest, "--runs", str(folder.parent)]), begun=folder)


def leaves(config: object) -> set[str]:
    """The dotted names of a configuration's keys; empty for what is no configuration."""
    if not isinstance(config, dict):
        return set()
    return {f"{key}.{below}" if below else str(key) for key, value in config.items() for below in (leaves(value) or {""})}
