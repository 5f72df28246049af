"""What a run writes down: scalars to every logger, and ours among them."""

from __future__ import annotations

import resource
import sys
import time
from typing import TYPE_CHECKING

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from depthbench.training.module import step_done

if TYPE_CHECKING:
    from depthbench.store.writer import RunWriter


# Dense bf16 tensor-core FLOP/s by a part of the device's name, from NVIDIA's data sheets (SXM where there are several forms).
PEAK_BF16_FLOPS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "L4": 121e12,
    "4090": 165e12,
}


class StoreLogger(Logger):
    """Lightning's logger interface over a RunWriter: every metric becomes a row of the table ``scalars``.

    Rows need ``tokens`` and ``wall_s`` beside Lightning's step; metrics that arrive without them get tokens from the step.
    """

    def __init__(self, writer: RunWriter | None, *, run_id: str, tokens_per_step: int):
        super().__init__()
        self.writer, self._run_id, self.tokens_per_step = writer, run_id, tokens_per_step
        self.wall_s = 0.0

    @property
    def name(self) -> str:
        return "depthbench"

    @property
    def version(self) -> str:
        return self._run_id

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        step = step or 0
        at = {"step": step, "tokens": step * self.tokens_per_step, "wall_s": self.wall_s}
        self.writer.add("scalars", [{**at, "name": name, "value": float(value)} for name, value in metrics.items()])

    @rank_zero_only
    def save(self) -> None:
        """Wait until everything logged so far is on disk."""
        self.writer.drain()

    @rank_zero_only
    def log_hyperparams(self, *args, **kwargs) -> None:
        """The run's configuration is the ``run`` table's; there is nothing to add."""


class Recorder(L.Callback):
    """Sends the scalars of each optimizer step, and of each validation, to all loggers.

    The step is the number of optimizer steps done, the loss that of the batch which this step used. The first step and the last of
    the run are always logged, others every ``trainer.log_every_n_steps`` (0: no others). ``wall_s`` counts training and
    validation and goes on after a resume; tokens per second leave validation out. ``validated`` is the last step whose validation is
    on record: a run that was killed between that and its checkpoint repeats it, and it must not stand twice.
    """

    def __init__(self, *, tokens_per_step: int, last_step: int, flops_per_token: float, validated: int = 0):
        self.tokens_per_step, self.last_step, self.flops_per_token = tokens_per_step, last_step, flops_per_token
        self.validated = validated
        self._wall_before, self._started = 0.0, time.perf_counter()
        self._busy_since = self._started
        self._losses: list[torch.Tensor] = []
        self._steps_timed = 0
        self.latest: dict[str, float] = {}

    def state_dict(self) -> dict:
        return {"wall_s": self.wall_s}

    def load_state_dict(self, state: dict) -> None:
        self._wall_before = state["wall_s"]

    @property
    def wall_s(self) -> float:
        """Seconds spent in this run so far, earlier attempts included."""
        return self._wall_before + time.perf_counter() - self._started

    def exclude(self, seconds: float) -> None:
        """Leave time that was not spent training out of the tokens per second."""
        self._busy_since += seconds

    def on_train_start(self, trainer, module) -> None:
        self._started = self._busy_since = time.perf_counter()
        self._peak_flops = peak_flops(module.device)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self._losses.append(outputs["loss"].detach())
        if not step_done(trainer):
            return
        losses, self._losses = self._losses, []
        self._steps_timed += 1
        step = trainer.global_step
        every = trainer.log_every_n_steps
        if step not in (1, self.last_step) and not (every and step % every == 0):
            return
        # Lightning hands back each micro-batch's loss already divided by the accumulation.
        loss = trainer.strategy.reduce(torch.stack(losses).sum(), reduce_op="mean").item()
        self.latest = {
            "train/loss": loss,
            "train/grad_norm": float(module.grad_norm),
            "train/grad_norm_clipped": float(module.grad_norm_clipped),
            "train/lr": self._lr_used(trainer),
            **self._performance(trainer, module.device),
        }
        self._log(trainer, self.latest, step)

    def on_save_checkpoint(self, trainer, module, checkpoint) -> None:
        """A checkpoint stands for its step: what was recorded up to it must be on disk before, or a resumed run has a hole."""
        for logger in trainer.loggers:
            logger.save()

    def on_validation_start(self, trainer, module) -> None:
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer, module) -> None:
        self.exclude(time.perf_counter() - self._paused)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        self.latest.update(metrics)
        if trainer.state.fn == "fit" and trainer.global_step > self.validated:
            self._log(trainer, metrics, trainer.global_step)

    def _performance(self, trainer, device: torch.device) -> dict[str, float]:
        now = time.perf_counter()
        rate = self._steps_timed * self.tokens_per_step / (now - self._busy_since)
        self._busy_since, self._steps_timed = now, 0
        measured = {"perf/tokens_per_s": rate, "perf/peak_memory_bytes": peak_memory_bytes(device)}
        if self._peak_flops:
            measured["perf/mfu"] = rate * self.flops_per_token / (self._peak_flops * trainer.world_size)
        return measured

    @staticmethod
    def _lr_used(trainer) -> float:
        """The learning rate this step used: the scheduler has already moved on, so it is asked for its previous value."""
        scheduler = trainer.lr_scheduler_configs[0].scheduler
        return scheduler.base_lrs[0] * scheduler.lr_lambdas[0](scheduler.last_epoch - 1)

    def _log(self, trainer, metrics: dict[str, float], step: int) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, StoreLogger):
                logger.wall_s = self.wall_s
            logger.log_metrics(metrics, step=step)


def peak_flops(device: torch.device) -> float | None:
    """The GPU's dense bf16 FLOP/s; None for a CPU or a GPU that is not listed: then no MFU is recorded."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in PEAK_BF16_FLOPS.items() if part in name), None)


def peak_memory_bytes(device: torch.device) -> float:
    """Largest memory use so far: allocated on the GPU, or resident in this process on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
