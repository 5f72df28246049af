"""Layer-skip ablation during training: by how much the loss rises on fixed windows when one block is left out (probes.md, probe 4)."""

from __future__ import annotations

import time

import lightning as L
import torch

from depthbench.nn.model import LanguageModel
from depthbench.probes._prefixes import skip_losses
from depthbench.training.module import step_done
from depthbench.training.recorder import Recorder

WINDOWS = 16
LONGEST = 512  # tokens predicted per window
MICRO_BATCH = 4  # windows per forward pass


@torch.no_grad()
def skip_deltas(model: LanguageModel, blocks_BT: torch.Tensor) -> list[float]:
    """loss with block l skipped - loss, in nats per token, for every block l; ``blocks_BT`` is (windows, T + 1) token ids.

    Of the model as it trains: compiled where it is, under the autocast that is on.
    """
    losses = skip_losses(model, blocks_BT, rule=None, micro_batch=MICRO_BATCH) / blocks_BT[:, 1:].numel()
    return (losses[:-1] - losses[-1]).tolist()


class SkipAblation(L.Callback):
    """Records skip_delta before the first step, at the middle and at the end of the plan; its time is a scalar of its own.

    ``windows`` is the fixed (16, min(512, T) + 1) LongTensor of held-out token ids; ``sink(table, rows)`` receives the rows.
    """

    def __init__(self, sink, recorder: Recorder, windows: torch.Tensor, *, tokens_per_step: int, last_step: int):
        self.sink, self.recorder, self.windows = sink, recorder, windows
        self.tokens_per_step, self.steps = tokens_per_step, {0, last_step // 2, last_step}

    def on_train_start(self, trainer, module) -> None:
        if trainer.global_step == 0:
            self._record(trainer, module)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if trainer.global_step in self.steps and step_done(trainer):
            self._record(trainer, module)

    def _record(self, trainer, module) -> None:
        if not trainer.is_global_zero:
            return
        began, step = time.perf_counter(), trainer.global_step
        with trainer.precision_plugin.forward_context():
            module.model.eval()
            deltas = skip_deltas(module.model, self.windows.to(module.device))
            module.model.train()
        at = {"step": step, "tokens": step * self.tokens_per_step}
        row = {**at, "site": "block_out", "direction": "forward", "metric": "skip_delta"}
        self.sink("layer_stats", [{**row, "layer": layer, "value": value} for layer, value in enumerate(deltas)])
        seconds = time.perf_counter() - began
        self.recorder.exclude(seconds)
        self.sink("scalars", [{**at, "wall_s": self.recorder.wall_s, "name": "perf/skip_ablation_s", "value": seconds}])


def fixed_windows(dataset, *, seed: int = 0, count: int = WINDOWS) -> torch.Tensor:
    """The first min(512, T) + 1 tokens of ``count`` held-out blocks chosen with a fixed seed, the same for every run on this corpus."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(dataset), generator=generator)[:count].tolist()
    return torch.stack([dataset[index][: LONGEST + 1] for index in chosen])
