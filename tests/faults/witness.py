"""A Lightning callback that writes down what a run sees, and ends it where it is told to: used by name in commands of the tests."""

from __future__ import annotations

import json
import os
import random
import signal
from contextlib import suppress
from pathlib import Path

import lightning as L
import numpy as np
import torch

from depthbench.corpora import BlockDataset


class Crash(RuntimeError):
    """What a fault of the machine or of the code would be."""


class Witness(L.Callback):
    """Appends each micro-batch's step and block ids, and what the random generators give, to the file ``$WITNESS_FILE``.

    ``$WITNESS_STOP``, e.g. ``validation:6:SIGTERM``: at that place (start, train, validation) of optimizer step 6, send this process
    that signal, raise ``Crash`` where it is ``crash``, leave its disk no room where it is ``fill``, or break the model as ``BROKEN``
    says; of several, joined by ``+``, one after the other. A second number, as in ``validation.1``, is the batch.
    """

    def __init__(self):
        self.file = Path(os.environ["WITNESS_FILE"])
        self.place, self.step, self.how = (os.environ.get("WITNESS_STOP") or "nowhere:0:crash").split(":")

    def on_train_start(self, trainer, module) -> None:
        blocks = BlockDataset(trainer.datamodule.corpus, "train")
        self.ids = {blocks[index].numpy().tobytes(): index for index in range(len(blocks))}
        assert len(self.ids) == len(blocks), "two blocks of the corpus are equal"

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        seen = {
            "step": trainer.global_step + 1,
            "micro": batch_idx % trainer.accumulate_grad_batches,
            "ids": [self.ids[block.cpu().numpy().tobytes()] for block in batch],
            "drawn": [random.random(), float(np.random.rand()), torch.rand(()).item()],
        }
        with self.file.open("a") as file:
            file.write(json.dumps(seen) + "\n")
        if seen["micro"] == 0:
            self._stop("start", trainer.global_step + 1, module)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self._stop("train", trainer.global_step, module)

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0) -> None:
        self._stop(f"validation.{batch_idx}", trainer.global_step, module)

    def on_validation_end(self, trainer, module) -> None:
        self._stop("validated", trainer.global_step, module)

    def _stop(self, place: str, step: int, module) -> None:
        if (place, str(step)) != (self.place, self.step):
            return
        for how in self.how.split("+"):
            if how == "crash":
                raise Crash(f"at {place} of step {step}")
            if how == "fill":
                fill(self.file.parent)
            elif how.startswith("nan"):
                BROKEN[how](module.model.blocks[2].attention.core)
            else:
                os.kill(os.getpid(), signal.Signals[how])


def nan_weight(core) -> None:
    with torch.no_grad():
        last_matrix(core)[0, 0] = float("nan")


def nan_gradient(core) -> None:
    last_matrix(core).register_hook(lambda gradient: gradient * float("nan"))


def last_matrix(core) -> torch.nn.Parameter:
    return [parameter for parameter in core.parameters() if parameter.ndim == 2][-1]


BROKEN = {"nan_weight": nan_weight, "nan_gradient": nan_gradient}


def fill(folder: Path) -> None:
    """Take all the room that is left on the disk of ``folder``, with a file ``filler``."""
    with (folder / "filler").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass


def witnessed(file: Path) -> dict[tuple[int, int], dict]:
    """What was seen last of each (step, micro-batch): an attempt repeats the steps after its checkpoint."""
    lines = map(json.loads, file.read_text().splitlines())
    return {(line["step"], line["micro"]): line for line in lines}
