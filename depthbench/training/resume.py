"""Going on with a run that was begun: only as the run that it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from depthbench.errors import UserError
from depthbench.store.reader import read_run
from depthbench.store.runs import DECIDES
from depthbench.training.plan import Plan

# What a user turns to change a fact, where there is one thing that does.
FLAGS = {
    **{name: f"--{name.replace('_', '-')}" for name in ("arch", "lr", "seq_len", "batch_tokens", "micro_batch", "seed")},
    "tokens_planned": "--tokens",
    "max_steps": "--trainer.max_steps",
    "precision": "--trainer.precision",
}

WORLD_SIZE = "world size"


def refuse_another_run(folder: Path, plan: Plan, world_size: int) -> None:
    """Raise UserError, naming both values, where ``plan`` differs from the run in ``folder``.

    Beside what decides a run, the micro-batch and the number of processes must be the same: Lightning resumes by its count of
    micro-batches, and sums in another order are other sums.
    """
    refuse_changes(folder, begun_with(folder), asked_for(plan, world_size))


def refuse_another_world_size(folder: Path, world_size: int) -> None:
    """As ``refuse_another_run``, before there is a plan: what a step is shared by decides whether there can be one."""
    refuse_changes(folder, {WORLD_SIZE: read_run(folder)["n_device"]}, {WORLD_SIZE: world_size})


def refuse_changes(folder: Path, begun: dict[str, Any], asked: dict[str, Any]) -> None:
    recorded, asked = flat(begun), flat(asked)
    changed = [name for name in recorded | asked if recorded.get(name) != asked.get(name)]
    if not changed:
        return
    shown = [f"{called(name)} {recorded.get(name)}, and {asked.get(name)} is asked for" for name in changed[:3]]
    more = f" (and {len(changed) - 3} more)" if len(changed) > 3 else ""
    raise UserError(
        f"run {folder.name} was begun with {'; with '.join(shown)}{more}: "
        "go on with what it was begun with, or start over with `depthbench fit` and --fresh"
    )


def asked_for(plan: Plan, world_size: int) -> dict[str, Any]:
    return {**plan.decides, "micro_batch": plan.micro_batch, WORLD_SIZE: world_size}


def begun_with(folder: Path) -> dict[str, Any]:
    """What ``asked_for`` was when the run began, as far as it was recorded."""
    row = read_run(folder)
    config = json.loads(row["config"])
    steps, max_steps = config["data"]["steps"], config["command"]["trainer"]["max_steps"]
    return {
        **{name: row[name] for name in DECIDES if name in row},
        "options": json.loads(row["options"] or "{}"),
        "recipe": config["recipe"],
        "max_steps": min(steps, max_steps) if max_steps > 0 else steps,
        "micro_batch": config["data"]["micro_batch"],
        WORLD_SIZE: row["n_device"],
    }


def flat(facts: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested facts by their dotted names, as JSON would hold them."""
    return dict(_flat(json.loads(json.dumps(facts)), prefix))


def _flat(facts: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def called(name: str) -> str:
    return FLAGS.get(name) or name.replace("_", " ")
