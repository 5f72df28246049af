"""Going on with a run that was begun: only as the run that it is, and saying so where part of what it recorded is gone."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from depthbench.errors import UserError
from depthbench.store.reader import Store, read_run
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
    begun = begun_with(folder)
    known = {name: value for name, value in plan.options.items() if name in begun["options"] or name in plan.options_chosen}
    refuse_changes(folder, begun, {**asked_for(plan, world_size), "options": known})  # an option may be younger than the run


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


def tell_of_lost_rows(folder: Path, step: int) -> None:
    """Say in one line where not all that the run recorded up to its checkpoint at ``step`` can be read.

    Those steps are not run again, so that nothing brings their rows back.
    """
    store = Store(folder.parent)
    every = {json.loads(config)["command"]["trainer"]["log_every_n_steps"] for config in store.rows("run", [folder.name]).config}
    if len(every) != 1 or not (every := every.pop()):  # which steps were to be recorded, only one interval tells
        return
    recorded = set(store.scalars([folder.name], ["train/loss"]).step)
    lost = {1, *range(every, step + 1, every)} - recorded
    if lost:
        problem = store.runs().set_index("run_id").problem[folder.name]
        print(
            f"depthbench: {len(lost)} of the {step} steps before the checkpoint are not on record ({problem or 'files were removed'}), "
            "and going on does not bring them back: --fresh starts over and keeps what there is aside",
            file=sys.stderr,
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
        "options": config.get("options") or json.loads(row["options"] or "{}"),
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
