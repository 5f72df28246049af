"""A run from its command to its sealed folder."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path

import lightning as L
import yaml

from depthbench import __version__, shapes
from depthbench.corpora.sources import CORPORA
from depthbench.errors import UserError
from depthbench.nn.model import LanguageModel, build_model
from depthbench.resources import PACKAGE
from depthbench.store.disk import replacing, write_error
from depthbench.store.folder import is_run_folder
from depthbench.store.lock import LOCK, run_lock
from depthbench.store.reader import read_run
from depthbench.store.seal import seal_run
from depthbench.store.writer import RunWriter
from depthbench.training import checkpoints, final_probes
from depthbench.training.cli import ExperimentCLI
from depthbench.training.data import CorpusDataModule
from depthbench.training.divergence import Diverged
from depthbench.training.interruption import Interrupted, stopped_at_once
from depthbench.training.messages import announcement, how_to_go_on, last_good, summary
from depthbench.training.module import LanguageModelingModule
from depthbench.training.plan import Plan, resolve, run_row
from depthbench.training.resume import refuse_another_run, refuse_another_world_size, tell_of_lost_rows
from depthbench.training.trainer import bare_trainer, build_trainer, device_name, precision_of

DIVERGED = 3  # the exit code


def fit(cli: ExperimentCLI, *, begun: Path | None = None) -> int:
    """Train, or go on with, the run that this command names. Returns the exit code.

    A finished run says so and stops; one that was interrupted goes on from its newest checkpoint; ``--fresh`` starts over and keeps
    the old folder aside. ``begun`` is the folder of a run that is to go on, refused where the command means another run than that.
    Raises UserError for what the user can mend.
    """
    try:
        with stopped_at_once():
            return _fit(cli, begun)
    except Interrupted as stop:
        print("\nInterrupted while no step was under way; what was recorded is safe.", flush=True)
        return stop.exit_code


def _fit(cli: ExperimentCLI, begun: Path | None) -> int:
    quieten()
    trainer = bare_trainer(cli)
    if begun:
        refuse_another_world_size(begun, trainer.world_size)
    precision = precision_of(cli, trainer)
    plan = resolve(cli.experiment, precision=precision, max_steps=cli.config.trainer.max_steps, world_size=trainer.world_size)
    folder = begun or Path(cli.experiment.runs).expanduser() / plan.run_id
    if begun:
        refuse_another_run(folder, plan, trainer.world_size)
    if cli.config.fresh and holds_anything(folder):
        print(f"The old folder is kept as {keep_aside(folder)}")
    with run_lock(folder):  # from before it is decided what there is to go on from
        if is_run_folder(folder):
            refuse_another_run(folder, plan, trainer.world_size)
            row = read_run(folder)
            if row["status"] == "finished":
                return already_finished(folder, plan)
            if row["status"] == "diverged" and not begun:
                return already_diverged(folder, row)
            if begun:
                checkpoints.required(folder)
        elif checkpoints.steps(folder):
            raise UserError(
                f"{folder} has checkpoints, and what the run recorded is gone (its metrics.duckdb and segments): "
                "bring that back, or start over with --fresh, which keeps the folder aside"
            )
        if trainer.world_size > 1:
            raise UserError(f"a run on {trainer.world_size} devices is not supported yet: use --trainer.devices 1 and one process")
        return train(cli, plan, folder)


def already_finished(folder: Path, plan: Plan) -> int:
    seal_run(folder)  # it may have met a full disk when it ended
    print(f"Run {folder.name} is already finished; --fresh would start it over.")
    print(summary(folder.parent, folder.name, plan.card))
    return 0


def already_diverged(folder: Path, row: dict) -> int:
    why = json.loads(row["config"]).get("diverged", "its loss or gradient became non-finite")
    print(f"depthbench: run {folder.name} has diverged: {why}; {last_good(folder)}", file=sys.stderr)
    return DIVERGED


def train(cli: ExperimentCLI, plan: Plan, folder: Path) -> int:
    """Build everything, run Lightning, and seal the run folder whatever happens."""
    resume = checkpoints.newest(folder)
    if resume:
        tell_of_lost_rows(folder, resume[0])
    checkpoints.require_room(folder, plan.params_total, bytes_each=8 if plan.precision == "64-true" else 4)
    L.seed_everything(plan.experiment.seed, workers=True, verbose=False)
    model = build(plan)
    data = data_module(plan, cache_dir=folder / "chunks")
    print(announcement(plan, folder, resumed_from=resume[0] if resume else None), flush=True)
    facts = run_facts(cli, plan)
    with RunWriter(folder, facts, **attempt(folder, resume)) as writer:
        write_config(folder, repeatable_config(cli, plan))
        trainer = build_trainer(cli, plan, folder, writer, data)
        writer.update_run(device=device_name(trainer), n_device=trainer.world_size)
        module = LanguageModelingModule(model, recipe=plan.recipe, lr=plan.lr, total_steps=plan.steps)
        try:
            trainer.fit(module, datamodule=data, ckpt_path=resume[1] if resume else None, weights_only=True)
        except Interrupted as stop:
            writer.seal("interrupted")
            step = max(trainer.global_step, resume[0] if resume else 0)  # Lightning's is 0 until it has read the checkpoint
            print(f"\n{stop} at step {step} of {plan.last_step}. {how_to_go_on(folder)}", flush=True)
            return stop.exit_code
        except (KeyboardInterrupt, SystemExit):
            writer.seal("interrupted")
            print(f"\nInterrupted. {how_to_go_on(folder)}", flush=True)
            return 130
        except Diverged as why:
            writer.update_run(config=json.dumps(json.loads(facts["config"]) | {"diverged": str(why)}))
            writer.seal("diverged")
            print(f"depthbench: run {folder.name} diverged: {why}; {last_good(folder)}", file=sys.stderr, flush=True)
            return DIVERGED
        except BaseException:
            writer.seal("failed")
            raise
        ended = trainer.global_step >= plan.last_step
        writer.seal("finished" if ended else "interrupted")
    stopped = final_probes.measure(plan, folder, model.to(trainer.strategy.root_device), data) if ended else 0
    print(summary(folder.parent, folder.name, plan.card))
    if not ended:
        print(f"It stopped at step {trainer.global_step} of {plan.last_step}. {how_to_go_on(folder)}")
    return stopped


def write_config(folder: Path, text: str) -> None:
    try:
        with replacing(folder / "config.yaml") as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise write_error(folder / "config.yaml", error) from error


def build(plan: Plan) -> LanguageModel:
    """The plan's model, compiled by region where asked. UserError where the design's parameters are not as many as it says."""
    model = build_model(plan.experiment.arch, **plan.shape.model_kwargs(), **plan.recipe.model_kwargs(), **plan.options)
    counted = sum(parameter.numel() for parameter in model.parameters())
    if counted != plan.params_total:
        raise UserError(
            f"design {plan.experiment.arch} has {counted - plan.shape.params_total:,} parameters of its own, "
            f"its params_extra says {plan.params_extra:,}: mend that method"
        )
    if plan.experiment.compile:
        model.compile_regions()
    return model


def data_module(plan: Plan, cache_dir: Path | None = None) -> CorpusDataModule:
    """The plan's data; ``cache_dir`` takes the chunks of a remote corpus, local ones are read in place."""
    return CorpusDataModule(
        plan.corpus,
        seed=plan.experiment.seed,
        steps=plan.steps,
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        val_blocks=plan.val_blocks,
        workers=plan.experiment.workers,
        loader_timeout=plan.experiment.loader_timeout,
        cache_dir=cache_dir,
    )


def repeatable_config(cli: ExperimentCLI, plan: Plan) -> str:
    """The run's config.yaml: the command with what the plan decided in place of what was left open."""
    size = shapes.size_named(plan.experiment.size)
    resolved = {
        "options": plan.options,
        "ratio": plan.ratio_requested,
        "tokens": plan.tokens,
        "lr": plan.lr,
        "seq_len": plan.seq_len,
        "batch_tokens": plan.batch_tokens,
        "corpus": str(plan.corpus) if plan.experiment.corpus not in (None, *CORPORA) else plan.experiment.corpus or size.corpus,
        "tokenizer": plan.experiment.tokenizer or size.tokenizer,
        "trainer.precision": plan.precision,
    }
    return cli.resolved_config(**resolved)


def run_facts(cli: ExperimentCLI, plan: Plan) -> dict:
    """The first row of the ``run`` table: the plan, where the code came from, and the whole configuration."""
    config = {
        "command": yaml.safe_load(repeatable_config(cli, plan)),
        "recipe": asdict(plan.recipe),
        "options": plan.options,
        "data": {
            "folder": str(plan.corpus),
            "steps": plan.steps,
            "micro_batch": plan.micro_batch,
            "accumulation": plan.accumulation,
            "val_blocks": plan.val_blocks,
            "crosses_documents": plan.card.crosses_documents,
        },
    }
    return {
        **run_row(plan),
        "git_commit": git_commit(),
        "version": __version__,
        "device": "",
        "n_device": 1,
        "config": json.dumps(config, default=str),
    }


def attempt(folder: Path, resume: tuple[int, Path] | None) -> dict:
    """Which attempt this is, and the step it goes on from: rows of earlier attempts beyond that step are superseded."""
    if not is_run_folder(folder):
        return {"attempt": 1}
    return {"attempt": read_run(folder)["attempt"] + 1, "resumed_from_step": resume[0] if resume else None}


def keep_aside(folder: Path) -> Path:
    """Move a run folder under ``.aside`` beside the other runs, where no listing shows it."""
    aside = folder.parent / ".aside" / f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09d}"
    with run_lock(folder):
        try:
            aside.parent.mkdir(exist_ok=True)
            os.rename(folder, aside)
        except OSError as error:
            mend = "make that a writable folder, or choose another place with --runs DIR"
            raise UserError(f"{folder} cannot be kept aside in {aside.parent} ({error.strerror}): {mend}") from error
    return aside


def holds_anything(folder: Path) -> bool:
    """Whether there is more in the folder than the lock of a command that began nothing."""
    return folder.is_dir() and any(path.name != LOCK for path in folder.iterdir())


def git_commit() -> str | None:
    """The commit of a source checkout, None for an installed package."""
    if not (PACKAGE.parent / ".git").exists():
        return None
    try:
        asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=PACKAGE.parent, capture_output=True, text=True)
    except OSError:  # no git on this machine
        return None
    return asked.stdout.strip() or None


def quieten() -> None:
    """Lightning's own remarks are about choices that the plan has made; what a user must know is said in our words."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.|litdata\.|torchmetrics\.|torch\.")
