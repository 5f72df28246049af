"""The progress bar: optimizer steps, loss, tokens per second and time left; a line now and then where there is no terminal."""

from __future__ import annotations

import sys
import time

from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from depthbench.training.module import step_done

# Without a terminal (a log file, a scheduler) a bar would be one endless line: print about this many lines a run instead.
PLAIN_LINES = 20
FORMAT = "{desc}: {percentage:3.0f}%|{bar}| step {n_fmt}/{total_fmt} [{elapsed} < {remaining}{postfix}]"


class TrainingProgress(ProgressBar):
    """Shows ``recorder.latest`` after each optimizer step, up to ``last_step``."""

    def __init__(self, recorder, *, last_step: int, stream=None):
        super().__init__()
        self.recorder, self.last_step = recorder, last_step
        self.stream = stream or sys.stderr
        self._bar: tqdm | None = None
        self._enabled = True

    def disable(self) -> None:
        """Lightning calls this on every rank but the first."""
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer, module) -> None:
        if self._enabled and self.stream.isatty():
            self._bar = tqdm(
                total=self.last_step, initial=trainer.global_step, desc="training", bar_format=FORMAT, file=self.stream, dynamic_ncols=True
            )
        self._first, self._began = trainer.global_step, time.perf_counter()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        if not self._enabled or not step_done(trainer):
            return
        step = trainer.global_step
        if self._bar is not None:
            self._bar.set_postfix_str(self._figures(), refresh=False)
            self._bar.update(step - self._bar.n)
        elif step in (self._first + 1, self.last_step) or step % max(1, self.last_step // PLAIN_LINES) == 0:
            print(f"step {step}/{self.last_step}, {self._figures()}, {self._time_left(step)} left", file=self.stream, flush=True)

    def on_validation_start(self, trainer, module) -> None:
        if self._bar is not None:
            self._bar.set_description_str("validating")

    def on_validation_end(self, trainer, module) -> None:
        if self._bar is not None:
            self._bar.set_description_str("training")
            self._bar.set_postfix_str(self._figures())
        elif self._enabled and trainer.state.fn == "fit" and "val/loss" in trainer.callback_metrics:
            print(
                f"step {trainer.global_step}/{self.last_step}, validation loss {trainer.callback_metrics['val/loss']:.4f}",
                file=self.stream,
                flush=True,
            )

    def on_train_end(self, trainer, module) -> None:
        self._close()

    def on_exception(self, trainer, module, exception) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _figures(self) -> str:
        """The latest recorded figures; a resumed run has none before its first step."""
        formats = {"train/loss": "loss {:.3f}", "val/loss": "val {:.3f}", "perf/tokens_per_s": "{:,.0f} tokens/s"}
        latest = self.recorder.latest
        return ", ".join(text.format(latest[name]) for name, text in formats.items() if name in latest)

    def _time_left(self, step: int) -> str:
        per_step = (time.perf_counter() - self._began) / (step - self._first)
        return tqdm.format_interval(per_step * (self.last_step - step))
