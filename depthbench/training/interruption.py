"""Ctrl-C and SIGTERM: finish the step, save a checkpoint, then leave; the caller seals the run as interrupted."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L
from lightning.pytorch.callbacks import Timer

from depthbench.training.checkpoints import Checkpoints
from depthbench.training.divergence import refuse_weights
from depthbench.training.module import step_done

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """Raised after a signal; by ``Interruption`` at the first boundary. ``exit_code`` is the shell's: 128 plus the signal's number.

    No Exception: whatever a library tries again or passes over, this ends it.
    """

    def __init__(self, signum: int):
        super().__init__("Interrupted")
        self.exit_code = 128 + signum


class OutOfTime(Interrupted):
    """Raised as after a signal, where the time that the user allowed is used up: for this there is no exit code but success."""

    def __init__(self):
        BaseException.__init__(self, "The time allowed is used up: stopped")
        self.exit_code = 0


@contextmanager
def stopped_at_once() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise ``Interrupted`` wherever the block stands: for work that loses little by it.

    Outside the main thread, where Python allows no handlers, it changes nothing.
    """
    raised: list[Interrupted] = []

    def stop(signum, frame):
        raised.append(Interrupted(signum))
        raise raised[-1]

    try:
        previous = {number: signal.signal(number, stop) for number in SIGNALS}
    except ValueError:
        previous = {}
    try:
        yield
    except RuntimeError as error:
        if not raised:
            raise
        raise raised[-1] from error  # what DuckDB makes of it in the middle of a query
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Interruption(L.Callback):
    """Turns SIGINT and SIGTERM into an orderly end: at the next boundary of an optimizer step, or of a batch of a validation.

    A validation that is cut short is run again, all of it, by the attempt that goes on: the checkpoint says that it is due. A second
    Ctrl-C ends at once. Lightning's own handlers would leave with exit code 0 or 1 and nothing saved.
    """

    def __init__(self, checkpoints: Checkpoints):
        self.checkpoints = checkpoints
        self.received: Interrupted | None = None
        self._validation_due = False
        self._previous: dict[int, object] = {}

    def state_dict(self) -> dict:
        return {"validation_due": self._validation_due}

    def load_state_dict(self, state: dict) -> None:
        self._validation_due = state["validation_due"]

    def on_train_start(self, trainer, module) -> None:
        self._previous = {number: signal.signal(number, self._receive) for number in SIGNALS}
        if self._validation_due:
            validate(trainer)

    def _receive(self, signum, frame) -> None:
        if self.received is not None and signum == signal.SIGINT:
            raise Interrupted(signum)
        self.received = Interrupted(signum)
        # Not print(): a handler may run in the middle of another print, and buffered streams refuse that.
        os.write(2, b"\nStopping after this step (Ctrl-C again: at once) ...\n")

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if self.received is not None and self.checkpoints.exists(trainer.global_step):
            raise self.received

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        validation_due = trainer.should_stop or (batch_idx + 1) % trainer.val_check_batch == 0
        if step_done(trainer) and not validation_due:
            self._leave_if_asked(trainer, module)

    def on_validation_start(self, trainer, module) -> None:
        if trainer.state.fn == "fit":
            self._validation_due = True
            self._leave_if_asked(trainer, module)

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0) -> None:
        if trainer.state.fn == "fit":
            self._leave_if_asked(trainer, module)

    def on_validation_epoch_end(self, trainer, module) -> None:
        self._validation_due = False  # before its checkpoint is saved

    def _leave_if_asked(self, trainer, module) -> None:
        if self.received is not None:
            refuse_weights(trainer, module.model)  # no loss has been computed with them yet
            self.checkpoints.save(trainer)
            raise self.received

    def on_train_end(self, trainer, module) -> None:
        self._restore()
        if self.received is not None:  # during the last checkpoint: what comes after training is left to the next attempt
            raise self.received

    def on_exception(self, trainer, module, exception) -> None:
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}


class TimeLimit(Timer):
    """Lightning's ``--trainer.max_time``, for each attempt anew, and stopping as a signal does: at once after a step.

    Lightning's own goes on counting, so that a resumed run would end at once, and validates where no validation is planned.
    """

    def __init__(self, duration, interruption: Interruption):
        super().__init__(duration)
        self._interruption = interruption

    def load_state_dict(self, state_dict: dict) -> None:
        pass

    def on_train_batch_end(self, *_) -> None:
        if self.time_remaining() <= 0 and self._interruption.received is None:
            self._interruption.received = OutOfTime()


def validate(trainer: L.Trainer) -> None:
    """Run the validation of the step that is done, as Lightning's training loop does after it."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop.restarting = False  # from its first block, whatever the checkpoint says of the one before
    trainer.validating = True
    loop.run()
    trainer.training = True
