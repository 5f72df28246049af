"""Checkpoint files of a run folder: ``checkpoints/step-00000200.ckpt``, and the best by validation loss beside them."""

from __future__ import annotations

import os
import re
import sys
import zipfile
from pathlib import Path
from pickle import UnpicklingError

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint

from depthbench.errors import UserError
from depthbench.store.disk import write_error

KEPT = 2  # the newest ones; the best by validation loss is kept besides
NAME = re.compile(r"step-(\d+)\.ckpt")


def folder(run_folder: Path) -> Path:
    return Path(run_folder) / "checkpoints"


def path(run_folder: Path, step: int) -> Path:
    """Where the checkpoint of optimizer step ``step`` lies."""
    return folder(run_folder) / f"step-{step:08d}.ckpt"


def step_of(file: Path) -> int:
    """The optimizer step of a checkpoint file."""
    return int(NAME.fullmatch(file.name)[1])


def steps(run_folder: Path) -> list[int]:
    """The steps that have a checkpoint, oldest first."""
    return sorted(int(match[1]) for file in folder(run_folder).glob("*.ckpt") if (match := NAME.fullmatch(file.name)))


def newest(run_folder: Path) -> tuple[int, Path] | None:
    """(step, file) of the newest whole checkpoint, or None where there is none yet; a truncated one is skipped with a warning."""
    for step in reversed(steps(run_folder)):
        file = path(run_folder, step)
        if zipfile.is_zipfile(file):  # PyTorch's format; what makes it whole is its last bytes
            return step, file
        print(f"depthbench: checkpoint {file} is truncated: the one before it is used", file=sys.stderr)
    return None


def weights(file: Path) -> dict[str, torch.Tensor]:
    """The model's weights in a checkpoint, on the CPU, as they were written. Raises UserError where the file is damaged.

    What a user was handed is never unpickled: of a checkpoint, tensors and plain values are read, nothing else.
    """
    try:
        stored = torch.load(file, map_location="cpu", weights_only=True)["state_dict"]
    except (OSError, RuntimeError, EOFError, UnpicklingError, KeyError) as error:
        raise UserError(f"checkpoint {file} is damaged: remove it, and the one before it is used") from error
    return {name.removeprefix("model."): tensor for name, tensor in stored.items() if name.startswith("model.")}


def prune(run_folder: Path, keep: int = KEPT) -> None:
    """Remove all but the newest checkpoints."""
    for step in steps(run_folder)[:-keep]:
        path(run_folder, step).unlink(missing_ok=True)


def usual_mode() -> int:
    """The permissions of a new file of this user's."""
    mask = os.umask(0)  # there is no way to read it but to set it
    os.umask(mask)
    return 0o666 & ~mask


class CheckpointFiles(TorchCheckpointIO):
    """Lightning's checkpoint files; a disk that refuses one is the user's to mend, in one line."""

    def save_checkpoint(self, checkpoint, path, storage_options=None) -> None:
        try:
            super().save_checkpoint(checkpoint, path, storage_options)
            os.chmod(path, usual_mode())  # the library leaves a temporary file's 0600
        except OSError as error:
            raise write_error(Path(path).parent, error) from error


def required(run_folder: Path) -> Path:
    """The newest checkpoint; a run without one is a UserError."""
    found = newest(run_folder)
    if found is None:
        raise UserError(
            f"run {Path(run_folder).name} has no whole checkpoint: it has not come to its first validation, or they were removed; "
            "repeat its command, with --fresh if it is finished"
        )
    return found[1]


def keepers(run_folder: Path) -> list[ModelCheckpoint]:
    """Callbacks that keep, at each validation, the last two checkpoints and the best one."""
    common = {
        "dirpath": folder(run_folder),
        "auto_insert_metric_name": False,
        "save_on_train_epoch_end": False,
        "enable_version_counter": False,
    }
    last = ModelCheckpoint(filename="step-{step:08d}", monitor="step", mode="max", save_top_k=KEPT, **common)
    best = ModelCheckpoint(filename="best-{step:08d}", monitor="val/loss", mode="min", save_top_k=1, **common)
    return [last, best]
