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
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from lightning.pytorch.callbacks import Timer

from depthbench import __version__, shapes
from depthbench.corpora.sources import CORPORA
from depthbench.errors import UserError, unknown
from depthbench.nn.model import LanguageModel, build_model
from depthbench.resources import PACKAGE
from depthbench.shapes import flops_per_token_train
from depthbench.store.folder import is_run_folder
from depthbench.store.lock import run_lock
from depthbench.store.reader import read_run
from depthbench.store.seal import seal_run
from depthbench.store.writer import RunWriter
from depthbench.training import checkpoints
from depthbench.training.cli import ExperimentCLI, first_line
from depthbench.training.data import CorpusDataModule
from depthbench.training.interruption import Interrupted, Interruption
from depthbench.training.layer_stats import LayerStatistics
from depthbench.training.messages import announcement, how_to_go_on, summary
from depthbench.training.module import LanguageModelingModule
from depthbench.training.plan import Plan, resolve, run_row
from depthbench.training.progress import TrainingProgress
from depthbench.training.recorder import Recorder, StoreLogger
from depthbench.training.skip_ablation import SkipAblation, fixed_windows

# fp16 is not among them: its scaler would multiply the recorded gradients.
PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "64-true")


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
    precision = precision_of(cli, probe)
    plan = resolve(cli.experiment, precision=precision, max_steps=cli.config.trainer.max_steps, world_size=probe.world_size)
    folder = Path(cli.experiment.runs).expanduser() / plan.run_id
    if cli.config.fresh and is_run_folder(folder):
        print(f"The old folder is kept as {keep_aside(folder)}")
    with run_lock(folder):  # from before it is decided what there is to go on from
        if is_run_folder(folder) and read_run(folder)["status"] == "finished":
            seal_run(folder)  # it may have met a full disk when it ended
            print(f"Run {plan.run_id} is already finished; --fresh would start it over.")
            print(summary(folder.parent, plan.run_id, plan.card))
            return 0
        return train(cli, plan, folder)


def train(cli: ExperimentCLI, plan: Plan, folder: Path) -> int:
    """Build everything, run Lightning, and seal the run folder whatever happens."""
    resume = checkpoints.newest(folder)
    if resume:
        refuse_other_micro_batch(folder, plan)
    L.seed_everything(plan.experiment.seed, workers=True, verbose=False)
    model = build(plan)
    data = data_module(plan, cache_dir=folder / "chunks")
    print(announcement(plan, folder, resumed_from=resume[0] if resume else None), flush=True)
    with RunWriter(folder, run_facts(cli, plan), **attempt(folder, resume)) as writer:
        (folder / "config.yaml").write_text(repeatable_config(cli, plan), encoding="utf-8")
        trainer = build_trainer(cli, plan, folder, writer, data)
        writer.update_run(device=device_name(trainer), n_device=trainer.world_size)
        module = LanguageModelingModule(model, recipe=plan.recipe, lr=plan.lr, total_steps=plan.steps)
        try:
            trainer.fit(module, datamodule=data, ckpt_path=resume[1] if resume else None, weights_only=True)
        except Interrupted as stop:
            writer.seal("interrupted")
            print(f"\nInterrupted at step {trainer.global_step} of {plan.last_step}. {how_to_go_on(folder)}", flush=True)
            return stop.exit_code
        except (KeyboardInterrupt, SystemExit):
            writer.seal("interrupted")
            print(f"\nInterrupted. {how_to_go_on(folder)}", flush=True)
            return 130
        except BaseException:
            writer.seal("failed")
            raise
        ended = trainer.global_step >= plan.last_step
        writer.seal("finished" if ended else "interrupted")
    print(summary(folder.parent, plan.run_id, plan.card))
    if not ended:
        print(f"It stopped at step {trainer.global_step} of {plan.last_step}. {how_to_go_on(folder)}")
    return 0


def refuse_other_micro_batch(folder: Path, plan: Plan) -> None:
    """Lightning resumes by its count of micro-batches: another size of them would shift every sequence that follows."""
    begun = json.loads(read_run(folder)["config"])["data"]["micro_batch"]
    if begun != plan.micro_batch:
        raise UserError(
            f"run {plan.run_id} was begun with --micro-batch {begun}, and {plan.micro_batch} is asked for: "
            f"go on with --micro-batch {begun}, or start over with --fresh"
        )


class AttemptTimer(Timer):
    """Lightning's ``--trainer.max_time``, anew for each attempt: its own timer goes on counting, and a resumed run would end at once."""

    def load_state_dict(self, state_dict: dict) -> None:
        pass


def build(plan: Plan) -> LanguageModel:
    """The plan's model, compiled by region where asked. UserError where the design's parameters are not as many as it says."""
    model = build_model(plan.experiment.arch, **plan.shape.model_kwargs(), norm_eps=plan.recipe.norm_eps)
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
        cache_dir=cache_dir,
    )


def build_trainer(cli: ExperimentCLI, plan: Plan, folder: Path, writer: RunWriter, data: CorpusDataModule) -> L.Trainer:
    """Lightning's Trainer with the user's arguments, ours, our logger and our callbacks before the user's own."""
    config = dict(cli.config_init.trainer)
    at = {"tokens_per_step": plan.batch_tokens, "last_step": plan.last_step}
    recorder = Recorder(**at, flops_per_token=flops_per_token_train(plan.shape, plan.seq_len))
    callbacks = [recorder, StopAtLastStep(plan.last_step)]
    if plan.experiment.layer_stats_every > 0:
        windows = fixed_windows(data.val_dataset())
        callbacks += [
            LayerStatistics(writer.add, every_n_steps=plan.experiment.layer_stats_every, **at),
            SkipAblation(writer.add, recorder, windows, **at),
        ]
    if config.pop("enable_progress_bar", None) is not False:
        callbacks.append(TrainingProgress(recorder, last_step=plan.last_step))
    if config.get("max_time"):
        callbacks.append(AttemptTimer(config.pop("max_time")))
    callbacks += [*as_list(config.pop("callbacks", None)), *checkpoints.keepers(folder), Interruption(folder)]
    logger = StoreLogger(writer, run_id=plan.run_id, tokens_per_step=plan.batch_tokens)
    return L.Trainer(
        **{
            **config,
            "callbacks": callbacks,
            "logger": [logger, *as_list(config.pop("logger", None))],
            "plugins": [*as_list(config.pop("plugins", None)), checkpoints.CheckpointFiles()],
            "precision": plan.precision,
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


def as_list(asked) -> list:
    """What a user gave for a Trainer argument that takes one, several, or none (also as true or false)."""
    if asked is None or isinstance(asked, bool):
        return []
    return list(asked) if isinstance(asked, (list, tuple)) else [asked]


def bare_trainer(cli: ExperimentCLI) -> L.Trainer:
    """A Trainer with the user's devices only: says the accelerator and the world size before anything is built."""
    trainer = _bare_trainer(cli)
    if isinstance(trainer.accelerator, MPSAccelerator) and cli.config.trainer.accelerator == "auto":
        cli.config_init.trainer.accelerator = "cpu"  # Apple's GPUs lack fp64, in which losses are summed
        trainer = _bare_trainer(cli)
    if trainer.world_size > 1:
        raise UserError(f"a run on {trainer.world_size} devices is not supported yet: use --trainer.devices 1 and one process")
    return trainer


def _bare_trainer(cli: ExperimentCLI) -> L.Trainer:
    asked = {key: cli.config_init.trainer[key] for key in ("accelerator", "strategy", "devices", "num_nodes", "precision", "plugins")}
    try:
        return L.Trainer(**asked, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    except (MisconfigurationException, ValueError, TypeError, ImportError) as error:
        mend = "; use --trainer.accelerator cpu, or look at the driver" if "backend" in str(error) else ""
        raise UserError(f"the trainer cannot start: {first_line(error)}{mend}") from error


def precision_of(cli: ExperimentCLI, trainer: L.Trainer) -> str:
    """Lightning's name of the asked precision; where none is asked, bf16 autocast on a GPU and fp32 elsewhere."""
    if cli.config.trainer.precision is None:
        return "bf16-mixed" if isinstance(trainer.accelerator, CUDAAccelerator) else "32-true"
    if trainer.precision not in PRECISIONS:
        raise unknown("precision", trainer.precision, PRECISIONS)
    return trainer.precision


def device_name(trainer: L.Trainer) -> str:
    if isinstance(trainer.accelerator, CUDAAccelerator):
        return torch.cuda.get_device_name(trainer.strategy.root_device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def repeatable_config(cli: ExperimentCLI, plan: Plan) -> str:
    """The run's config.yaml: the command with what the plan decided in place of what was left open."""
    size = shapes.size_named(plan.experiment.size)
    resolved = {
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
    aside.parent.mkdir(exist_ok=True)
    with run_lock(folder):
        shutil.move(folder, aside)
    return aside


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
