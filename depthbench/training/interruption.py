"""Ctrl-C and SIGTERM: finish the step, save a checkpoint, then leave; the caller seals the run as interrupted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L

from depthbench.training import checkpoints
from depthbench.training.module import step_done


class Interrupted(Exception):
    """Raised after a signal; by ``Interruption`` at the first boundary. ``exit_code`` is the shell's: 128 plus the signal's number."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.exit_code = 128 + signum


@contextmanager
def stopped_at_once() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise ``Interrupted`` wherever the block stands: for work that loses little by it. Main thread only."""

    def stop(signum, frame):
        raise Interrupted(signum)

    previous = {number: signal.signal(number, stop) for number in Interruption.SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Interruption(L.Callback):
    """Turns SIGINT and SIGTERM into an orderly end: after the optimizer step, or the validation, that is in progress.

    A validation is finished because its checkpoint is only written then. A second Ctrl-C ends at once. Lightning's own handlers would
    leave with exit code 0 or 1 and nothing saved.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, folder):
        self.folder = folder
        self.received: int | None = None
        self._previous: dict[int, object] = {}

    def on_train_start(self, trainer, module) -> None:
        self._previous = {number: signal.signal(number, self._receive) for number in self.SIGNALS}

    def _receive(self, signum, frame) -> None:
        if self.received is not None and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signum
        # Not print(): a handler may run in the middle of another print, and buffered streams refuse that.
        os.write(2, b"\nStopping after this step (Ctrl-C again: at once) ...\n")

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if self.received is not None and checkpoints.path(self.folder, trainer.global_step).exists():
            raise Interrupted(self.received)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        validation_due = trainer.should_stop or (batch_idx + 1) % trainer.val_check_batch == 0
        if self.received is None or validation_due or not step_done(trainer):
            return  # a validation that is due writes the checkpoint itself, after which the run ends or is stopped
        trainer.save_checkpoint(checkpoints.path(self.folder, trainer.global_step))
        checkpoints.prune(self.folder)
        raise Interrupted(self.received)

    def on_train_end(self, trainer, module) -> None:
        self._restore()

    def on_exception(self, trainer, module, exception) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
