"""The command that trains one more run comparable with those shown."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

import pandas as pd

from depthbench.errors import UserError
from depthbench.recipes import learning_rate
from depthbench.shapes import size_named


def another_shape(run: pd.Series, runs_dir: Path) -> str | None:
    """The `depthbench fit` line that repeats ``run`` (a row of the store's runs) at another aspect ratio, quoted for the shell.

    The ratio is the rung of the size's ladder that is farthest from the run's. None for a size that this version does not know.
    """
    try:
        size = size_named(run["size"])
        ratio = max(size.ladder(run["budget"]), key=lambda rung: abs(math.log(rung / run["ratio"])))
        usual = {"seq_len": size.seq_len, "batch_tokens": size.batch_tokens, "tokenizer": size.tokenizer}
        asked = _asked(run)
        usual["lr"] = learning_rate(size, run["arch"], asked.get("recipe", "paper"))
    except UserError:
        return None
    flags = {"arch": run["arch"], "size": run["size"], "budget": run["budget"], "ratio": f"{ratio:g}"}
    flags |= {"corpus": run["corpus"], "tokens": f"{run['tokens_planned']:.0f}", "seed": f"{run['seed']:.0f}"}
    flags["trainer.precision"] = run["precision"]  # by default it depends on the machine
    for column, value in usual.items():
        if pd.notna(run[column]) and run[column] != value:
            flags[column.replace("_", "-")] = run[column] if isinstance(run[column], str) else f"{run[column]:.12g}"
    flags |= asked
    if str(runs_dir) != "runs":
        flags["runs"] = str(runs_dir)
    return shlex.join(["depthbench", "fit", *(text for name, value in flags.items() for text in (f"--{name}", str(value)))])


def _asked(run: pd.Series) -> dict[str, str]:
    """What the run's command asked for beyond the flags that every command has."""
    command = json.loads(run["config"] or "{}").get("command", {})
    asked = {}
    if command.get("recipe", "paper") != "paper":
        asked["recipe"] = command["recipe"]
    for name, value in json.loads(run["options"] or "{}").items():
        asked[f"arch.{name}"] = value if isinstance(value, str) else json.dumps(value)
    if command.get("count_extras"):
        asked["count-extras"] = "true"
    if str(command.get("tokenizer", "")).endswith(".json"):
        asked["tokenizer"] = command["tokenizer"]  # the store has its name only
    return asked
