"""Checkpoint files of a run folder, ``checkpoints/step-00000200.ckpt``: the newest two, and the best by validation loss.

A file is written beside its place and renamed, so that a name stands for a whole file; damage that comes later is found before it is
read, and the checkpoint before it is used. Nothing in a checkpoint is ever executed: tensors and plain values are read, nothing else.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import zipfile
import zlib
from pathlib import Path
from pickle import UnpicklingError
from typing import BinaryIO

import lightning as L
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint

from depthbench.errors import UserError
from depthbench.store.disk import remove_leftovers, replacing, write_error

KEPT = 2  # the newest ones; the best by validation loss is kept besides
ROOM_FOR = KEPT + 2  # those, the best, and the one that is being written
COPIES = 3  # of the parameters: the weights and AdamW's two moments
COMMENT = b"crc32 %08x"  # of all the bytes before it
END_RECORD = 22  # bytes of a zip archive's end record, the last two of which are the length of the comment that follows
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
    return sorted(int(match[1]) for file in folder(run_folder).glob("*.ckpt") if (match := NAME.fullmatch(file.name)) and file.is_file())


def newest(run_folder: Path) -> tuple[int, Path] | None:
    """(step, file) of the newest whole checkpoint, or None where there is none; others are skipped with a warning."""
    skipped, found = [], None
    for step in reversed(steps(run_folder)):
        file = path(run_folder, step)
        if problem := problem_of(file):
            skipped.append(f"checkpoint {file} {problem}")
        else:
            found = step, file
            break
    instead = f"the one of step {found[0]} is used" if found else "no whole one is left"
    for problem in skipped:
        print(f"depthbench: {problem}: {instead}", file=sys.stderr)
    return found


def problem_of(file: Path) -> str | None:
    """Why a run cannot go on from this checkpoint, in words; None where it can."""
    if not is_whole(file):
        return "is damaged"
    stored_step = CheckpointFiles().load_checkpoint(file, mmap=True).get("global_step", step_of(file))
    return None if stored_step == step_of(file) else f"is that of step {stored_step} under another name"


def is_whole(file: Path) -> bool:
    """Whether every byte is as it was written, by the checksum at the end of the file.

    Files of versions that wrote none are whole where the checksums of the archive's parts say so.
    """
    try:
        with open(file, "rb") as stream:
            left = max(0, os.fstat(stream.fileno()).st_size - len(COMMENT % 0))
            checksum = 0
            while left and (part := stream.read(min(left, 1 << 20))):
                checksum, left = zlib.crc32(part, checksum), left - len(part)
            comment = stream.read()
        if comment.startswith(COMMENT[:6]):
            return comment == COMMENT % checksum
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is None
    except (OSError, EOFError, zipfile.BadZipFile, NotImplementedError, ValueError, RuntimeError):
        return False


class Checksummed:
    """Writes PyTorch's format, a zip archive, with a checksum of all of it as the archive's comment: other readers pass over it.

    The checksums of the archive's parts leave its frame out, and there a flipped bit can give another tensor's bytes.
    """

    def __init__(self, file: BinaryIO):
        self._file, self._checksum = file, 0
        self._held = b""  # the last bytes so far: the archive's end record says how long its comment is

    def write(self, data) -> int:
        data = memoryview(data).cast("B")
        if len(data) < END_RECORD:
            data = memoryview(self._held + data)
        else:
            self._put(self._held)
        self._put(data[:-END_RECORD])
        self._held = bytes(data[-END_RECORD:])
        return len(data)

    def _put(self, data) -> None:
        self._checksum = zlib.crc32(data, self._checksum)
        self._file.write(data)

    def flush(self) -> None:
        """Nothing to do before the end."""

    def end(self) -> None:
        comment = len(COMMENT % 0)
        self._put(self._held[:-2] + comment.to_bytes(2, "little"))
        self._file.write(COMMENT % self._checksum)


def weights(file: Path) -> dict[str, torch.Tensor]:
    """The model's weights in a checkpoint, on the CPU, as they were written. Raises UserError where the file is damaged."""
    if not is_whole(file):
        raise UserError(f"checkpoint {file} is damaged: remove it, and the one before it is used")
    stored = CheckpointFiles().load_checkpoint(file)["state_dict"]
    return {name.removeprefix("model."): tensor for name, tensor in stored.items() if name.startswith("model.")}


def required(run_folder: Path) -> Path:
    """The newest checkpoint; a run without one is a UserError."""
    found = newest(run_folder)
    if found is None:
        raise UserError(
            f"run {Path(run_folder).name} has no whole checkpoint: it has not come to its first validation, or they were removed; "
            "repeat its command, with --fresh if it is finished or has diverged"
        )
    return found[1]


def require_room(run_folder: Path, n_params: int, bytes_each: int) -> None:
    """Raise UserError where the disk cannot take as many checkpoints of ``n_params`` parameters as a run has at a time.

    Those that are there already count: they are replaced.
    """
    needed = ROOM_FOR * COPIES * n_params * bytes_each
    there = sum(path(run_folder, step).stat().st_size for step in steps(run_folder))
    free = shutil.disk_usage(run_folder).free + there
    if free < needed:
        raise UserError(
            f"{Path(run_folder).parent} has {free / 1e9:.2g} GB free, and the checkpoints of {Path(run_folder).name} need "
            f"{needed / 1e9:.2g} GB ({ROOM_FOR} at a time): free some, or choose another place with --runs DIR"
        )


def usual_mode() -> int:
    """The permissions of a new file of this user's."""
    mask = os.umask(0)  # there is no way to read it but to set it
    os.umask(mask)
    return 0o666 & ~mask


class CheckpointFiles(TorchCheckpointIO):
    """How Lightning writes a checkpoint: whole or not at all. A disk that refuses one is the user's to mend, in one line."""

    def save_checkpoint(self, checkpoint, path, storage_options=None) -> None:
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary, open(temporary, "wb") as file:
                checksummed = Checksummed(file)
                torch.save(checkpoint, checksummed)
                checksummed.end()
        except (OSError, RuntimeError) as error:
            # torch, refused by the disk, ends its archive all the same, and complains of that instead.
            refusal = error if isinstance(error, OSError) else error.__context__
            if not isinstance(refusal, OSError):
                raise
            raise write_error(path.parent, refusal) from error

    def load_checkpoint(self, path, map_location="cpu", weights_only=True, *, mmap: bool = False) -> dict:
        """Raises UserError for a file that asks for anything but tensors and plain values; nothing of it is executed.

        ``mmap``: tensors are read from the file when they are looked at.
        """
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        except (UnpicklingError, RuntimeError, EOFError, KeyError) as error:
            raise UserError(f"{path} is no checkpoint of depthbench's: remove it, and the one before it is used") from error


class Checkpoints(Checkpoint):
    """Saves the run at each validation and keeps the newest two checkpoints and the best by validation loss, on any rank alike."""

    def __init__(self, run_folder: Path):
        self.run_folder = run_folder
        self.best: tuple[int, float] | None = None  # step and validation loss
        remove_leftovers(folder(run_folder))

    def state_dict(self) -> dict:
        return {"best": self.best}

    def load_state_dict(self, state: dict) -> None:
        self.best = state["best"] and tuple(state["best"])

    def on_validation_end(self, trainer: L.Trainer, module) -> None:
        if trainer.state.fn != "fit":
            return
        loss = float(trainer.callback_metrics["val/loss"])
        if self.best is None or loss < self.best[1]:
            self.best = (trainer.global_step, loss)
        self.save(trainer)

    def save(self, trainer: L.Trainer) -> None:
        """Write the checkpoint of the step that is done, and remove those that are not to be kept."""
        trainer.save_checkpoint(path(self.run_folder, trainer.global_step))
        if trainer.is_global_zero:
            self._prune(trainer.global_step)

    def exists(self, step: int) -> bool:
        return path(self.run_folder, step).exists()

    def _prune(self, step: int) -> None:
        """Later ones than this are damaged, or the run would have gone on from them."""
        there = steps(self.run_folder)
        kept = [at for at in there if at <= step][-KEPT:]
        for at in there:
            if at not in kept and at != (self.best and self.best[0]):
                path(self.run_folder, at).unlink(missing_ok=True)
