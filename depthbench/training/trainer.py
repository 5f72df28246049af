"""Lightning's Trainer for a plan: the user's arguments, what the plan decides, our callbacks and our logger."""

from __future__ import annotations

import platform
from pathlib import Path

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator

from depthbench.errors import UserError, unknown
from depthbench.store.reader import Store
from depthbench.store.writer import RunWriter
from depthbench.training.checkpoints import CheckpointFiles, Checkpoints
from depthbench.training.cli import ExperimentCLI, first_line
from depthbench.training.data import CorpusDataModule
from depthbench.training.interruption import Interruption, TimeLimit
from depthbench.training.layer_stats import LayerStatistics
from depthbench.training.plan import Plan
from depthbench.training.progress import TrainingProgress
from depthbench.training.random_states import RandomStates
from depthbench.training.recorder import Recorder, StoreLogger
from depthbench.training.skip_ablation import SkipAblation, fixed_windows

# fp16 is not among them: its scaler would multiply the recorded gradients. Nor are bf16 weights: what starts at 1 (gains, the
# coefficients of hyper-connections) could not move by less than 1/256.
PRECISIONS = ("32-true", "bf16-mixed", "64-true")


class StopAtLastStep(L.Callback):
    """Asks Lightning to stop at the planned last step, so that this step always ends in a validation and a checkpoint.

    Lightning's ``max_steps`` would leave a run that goes on from its last step before the validation that may still be due.
    """

    def __init__(self, last_step: int):
        self.last_step = last_step

    def on_train_start(self, trainer, module) -> None:
        self._stop_if_done(trainer)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self._stop_if_done(trainer)

    def _stop_if_done(self, trainer) -> None:
        if trainer.global_step >= self.last_step:
            trainer.should_stop = True


def build_trainer(cli: ExperimentCLI, plan: Plan, folder: Path, writer: RunWriter, data: CorpusDataModule) -> L.Trainer:
    """Lightning's Trainer with the user's arguments, ours, our logger and our callbacks before the user's own."""
    config = dict(cli.config_init.trainer)
    at = {"tokens_per_step": plan.batch_tokens, "last_step": plan.last_step}
    recorder = Recorder(**at, flops_per_token=plan.flops_per_token, validated=validated_through(folder))
    callbacks = [recorder, StopAtLastStep(plan.last_step)]
    if plan.experiment.layer_stats_every > 0:
        windows = fixed_windows(data.val_dataset())
        callbacks += [
            LayerStatistics(writer.add, every_n_steps=plan.experiment.layer_stats_every, **at),
            SkipAblation(writer.add, recorder, windows, **at),
        ]
    if config.pop("enable_progress_bar", None) is not False:
        callbacks.append(TrainingProgress(recorder, last_step=plan.last_step))
    keeper = Checkpoints(folder)
    interruption = Interruption(keeper)
    if max_time := config.pop("max_time", None):
        callbacks.append(TimeLimit(max_time, interruption))
    callbacks += [*as_list(config.pop("callbacks", None)), RandomStates(), interruption, keeper]
    logger = StoreLogger(writer, run_id=plan.run_id, tokens_per_step=plan.batch_tokens)
    return L.Trainer(
        **{
            **config,
            "callbacks": callbacks,
            "logger": [logger, *as_list(config.pop("logger", None))],
            "plugins": [*as_list(config.pop("plugins", None)), CheckpointFiles()],
            "precision": plan.precision,
            "max_epochs": 1,
            "max_steps": -1,
            "accumulate_grad_batches": plan.accumulation,
            "gradient_clip_val": plan.recipe.max_grad_norm,
            "val_check_interval": -(-plan.last_step // plan.validations) * plan.accumulation,
            "num_sanity_val_steps": 0,
            "use_distributed_sampler": False,
            "default_root_dir": folder,
            "enable_autolog_hparams": False,
        }
    )


def validated_through(folder: Path) -> int:
    """The last step of which a validation is recorded and stands; 0 where there is none."""
    rows = Store(folder.parent).scalars([folder.name], ["val/loss"])
    return 0 if rows.empty else int(rows.step.max())


def as_list(asked) -> list:
    """What a user gave for a Trainer argument that takes one, several, or none (also as true or false)."""
    if asked is None or isinstance(asked, bool):
        return []
    return list(asked) if isinstance(asked, (list, tuple)) else [asked]


def bare_trainer(cli: ExperimentCLI) -> L.Trainer:
    """A Trainer with the user's settings and nothing of a run's: it says the accelerator and the world size, and refuses what Lightning
    refuses, before anything is built or written."""
    trainer = _bare_trainer(cli)
    if isinstance(trainer.accelerator, MPSAccelerator) and cli.config.trainer.accelerator == "auto":
        cli.config_init.trainer.accelerator = "cpu"  # Apple's GPUs lack fp64, in which losses are summed
        trainer = _bare_trainer(cli)
    return trainer


def _bare_trainer(cli: ExperimentCLI) -> L.Trainer:
    nothing = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    try:
        return L.Trainer(**{**cli.config_init.trainer, **nothing, "callbacks": None})
    except (MisconfigurationException, ValueError, TypeError, ImportError) as error:
        mend = "; use --trainer.accelerator cpu, or look at the driver" if "backend" in str(error) else ""
        raise UserError(f"the trainer cannot start: {first_line(error)}{mend}") from error


def precision_of(cli: ExperimentCLI, trainer: L.Trainer) -> str:
    """Lightning's name of the asked precision; where none is asked, bf16 autocast on a GPU and fp32 elsewhere."""
    if cli.config.trainer.precision is None:
        return "bf16-mixed" if isinstance(trainer.accelerator, CUDAAccelerator) else "32-true"
    asked = str(cli.config.trainer.precision)
    meant = asked if asked.startswith("16") else trainer.precision  # on a CPU, Lightning takes bf16 for fp16
    if meant not in PRECISIONS:
        raise unknown("precision", meant, PRECISIONS)
    return meant


def device_name(trainer: L.Trainer) -> str:
    if isinstance(trainer.accelerator, CUDAAccelerator):
        return torch.cuda.get_device_name(trainer.strategy.root_device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
