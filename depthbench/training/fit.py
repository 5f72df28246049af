"""A run from its command to its sealed folder."""

from __future__ import annotations

import json
import logging
import platform
import shutil
import subprocess
import time
import warnings
from dataclasses import asdict
from pathlib import Path

import lightning as L
import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import CUDAAccelerator

from depthbench import __version__
from depthbench.errors import UserError
from depthbench.nn.model import LanguageModel, build_model
from depthbench.resources import PACKAGE
from depthbench.shapes import flops_per_token_train
from depthbench.store.folder import is_run_folder
from depthbench.store.lock import run_lock
from depthbench.store.reader import read_run
from depthbench.store.seal import seal_run
from depthbench.store.writer import RunWriter
from depthbench.training import checkpoints
from depthbench.training.cli import ExperimentCLI
from depthbench.training.data import CorpusDataModule
from depthbench.training.interruption import Interrupted, Interruption
from depthbench.training.layer_stats import LayerStatistics
from depthbench.training.messages import HOW_TO_GO_ON, announcement, summary
from depthbench.training.module import LanguageModelingModule
from depthbench.training.plan import Plan, resolve, run_row
from depthbench.training.progress import TrainingProgress
from depthbench.training.recorder import Recorder, StoreLogger
from depthbench.training.skip_ablation import SkipAblation, fixed_windows


class StopAtLastStep(L.Callback):
    """Asks Lightning to stop at the planned last step, so that this step always ends in a validation and a checkpoint."""

    def __init__(self, last_step: int):
        self.last_step = last_step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if trainer.global_step >= self.last_step:
            trainer.should_stop = True


def fit(cli: ExperimentCLI) -> int:
    """Train, or go on with, the run that this command names. Returns the exit code.

    A finished run says so and stops; one that was interrupted goes on from its newest checkpoint; ``--fresh`` starts over and
    keeps the old folder aside. Raises UserError for what the user can mend.
    """
    quieten()
    probe = bare_trainer(cli)
    precision = cli.config.trainer.precision or default_precision(probe)
    plan = resolve(cli.experiment, precision=str(precision), max_steps=cli.config.trainer.max_steps, world_size=probe.world_size)
    folder = Path(cli.experiment.runs) / plan.run_id
    if cli.config.fresh and is_run_folder(folder):
        print(f"The old folder is kept as {keep_aside(folder)}")
    with run_lock(folder):  # from before it is decided what there is to go on from
        if is_run_folder(folder) and read_run(folder)["status"] == "finished":
            seal_run(folder)  # it may have met a full disk when it ended
            print(f"Run {plan.run_id} is already finished; --fresh would start it over.")
            print(summary(folder.parent, plan.run_id, plan.card))
            return 0
        return train(cli, plan, folder, precision)


def train(cli: ExperimentCLI, plan: Plan, folder: Path, precision: str) -> int:
    """Build everything, run Lightning, and seal the run folder whatever happens."""
    resume = checkpoints.newest(folder)
    L.seed_everything(plan.experiment.seed, workers=True, verbose=False)
    model = build(plan)
    data = data_module(plan)
    print(announcement(plan, folder, resumed_from=resume[0] if resume else None), flush=True)
    with RunWriter(folder, run_facts(cli, plan), **attempt(folder, resume)) as writer:
        (folder / "config.yaml").write_text(cli.resolved_config(), encoding="utf-8")
        trainer = build_trainer(cli, plan, folder, writer, data, precision)
        writer.update_run(device=device_name(trainer), n_device=trainer.world_size)
        module = LanguageModelingModule(model, recipe=plan.recipe, lr=plan.lr, total_steps=plan.steps)
        try:
            trainer.fit(module, datamodule=data, ckpt_path=resume[1] if resume else None, weights_only=True)
        except Interrupted as stop:
            writer.seal("interrupted")
            print(f"\nInterrupted at step {trainer.global_step} of {plan.last_step}. {HOW_TO_GO_ON}", flush=True)
            return stop.exit_code
        except (KeyboardInterrupt, SystemExit):
            writer.seal("interrupted")
            print(f"\nInterrupted. {HOW_TO_GO_ON}", flush=True)
            return 130
        except BaseException:
            writer.seal("failed")
            raise
        ended = trainer.global_step >= plan.last_step
        writer.seal("finished" if ended else "interrupted")
    print(summary(folder.parent, plan.run_id, plan.card))
    if not ended:
        print(f"It stopped at step {trainer.global_step} of {plan.last_step}. {HOW_TO_GO_ON}")
    return 0


def build(plan: Plan) -> LanguageModel:
    """The plan's model, compiled by region where asked."""
    model = build_model(plan.experiment.arch, **plan.shape.model_kwargs(), norm_eps=plan.recipe.norm_eps)
    if plan.experiment.compile:
        model.compile_regions()
    return model


def data_module(plan: Plan) -> CorpusDataModule:
    return CorpusDataModule(
        plan.corpus,
        seed=plan.experiment.seed,
        steps=plan.steps,
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        val_blocks=plan.val_blocks,
        workers=plan.experiment.workers,
    )


def build_trainer(cli: ExperimentCLI, plan: Plan, folder: Path, writer: RunWriter, data: CorpusDataModule, precision: str) -> L.Trainer:
    """Lightning's Trainer with the user's arguments, ours, our logger and our callbacks before the user's own."""
    config = dict(cli.config_init.trainer)
    at = {"tokens_per_step": plan.batch_tokens, "last_step": plan.last_step}
    dtype = torch.float32 if precision.startswith("32") else torch.bfloat16
    recorder = Recorder(**at, flops_per_token=flops_per_token_train(plan.shape, plan.seq_len), dtype=dtype)
    callbacks = [recorder, StopAtLastStep(plan.last_step)]
    if plan.experiment.layer_stats_every > 0:
        windows = fixed_windows(data.val_dataset())
        callbacks += [
            LayerStatistics(writer.add, every_n_steps=plan.experiment.layer_stats_every, **at),
            SkipAblation(writer.add, recorder, windows, **at),
        ]
    if config.pop("enable_progress_bar", None) is not False:
        callbacks.append(TrainingProgress(recorder, last_step=plan.last_step))
    callbacks += [*(config.pop("callbacks", None) or []), *checkpoints.keepers(folder), Interruption(folder)]
    logger = StoreLogger(writer, run_id=plan.run_id, tokens_per_step=plan.batch_tokens)
    return L.Trainer(
        **{
            **config,
            "callbacks": callbacks,
            "logger": [logger, *user_loggers(config.pop("logger", None))],
            "precision": precision,
            "max_epochs": 1,
            "max_steps": plan.last_step,
            "accumulate_grad_batches": plan.accumulation,
            "gradient_clip_val": plan.recipe.max_grad_norm,
            "val_check_interval": -(-plan.last_step // plan.validations) * plan.accumulation,
            "num_sanity_val_steps": 0,
            "use_distributed_sampler": False,
            "default_root_dir": folder,
            "enable_autolog_hparams": False,
        }
    )


def user_loggers(asked) -> list:
    """Lightning's ``--trainer.logger`` beside ours: one, several, or none."""
    if asked in (None, True, False):
        return []
    return list(asked) if isinstance(asked, (list, tuple)) else [asked]


def bare_trainer(cli: ExperimentCLI) -> L.Trainer:
    """A Trainer with the user's devices only: says the accelerator and the world size before anything is built."""
    keys = ("accelerator", "strategy", "devices", "num_nodes", "precision", "plugins")
    asked = {key: cli.config_init.trainer[key] for key in keys}
    try:
        return L.Trainer(**asked, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    except (MisconfigurationException, ValueError) as error:
        raise UserError(f"the trainer cannot start: {' '.join(str(error).split())}") from error


def default_precision(trainer: L.Trainer) -> str:
    """bf16 autocast on a GPU, fp32 elsewhere."""
    return "bf16-mixed" if isinstance(trainer.accelerator, CUDAAccelerator) else "32-true"


def device_name(trainer: L.Trainer) -> str:
    if isinstance(trainer.accelerator, CUDAAccelerator):
        return torch.cuda.get_device_name(trainer.strategy.root_device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def run_facts(cli: ExperimentCLI, plan: Plan) -> dict:
    """The first row of the ``run`` table: the plan, where the code came from, and the whole configuration."""
    config = {
        "command": yaml.safe_load(cli.resolved_config()),
        "recipe": asdict(plan.recipe),
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
    aside = folder.parent / ".aside" / f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    aside.parent.mkdir(exist_ok=True)
    with run_lock(folder):
        shutil.move(folder, aside)
    return aside


def git_commit() -> str | None:
    """The commit of a source checkout, None for an installed package."""
    if not (PACKAGE.parent / ".git").exists():
        return None
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=PACKAGE.parent, capture_output=True, text=True)
    return asked.stdout.strip() or None


def quieten() -> None:
    """Lightning's own remarks are about choices that the plan has made; what a user must know is said in our words."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.|litdata\.|torchmetrics\.|torch\.")
