"""Layer-skip ablation during training: by how much the loss rises on fixed windows when one block is left out (probes.md, probe 4)."""

from __future__ import annotations

import time

import lightning as L
import torch
from torch.nn import functional as F

from depthbench.nn.model import LanguageModel
from depthbench.training.module import step_done
from depthbench.training.recorder import Recorder

WINDOWS = 16
LONGEST = 512  # tokens predicted per window
MICRO_BATCH = 4  # windows per forward pass


@torch.no_grad()
def skip_deltas(model: LanguageModel, blocks_BT: torch.Tensor) -> list[float]:
    """loss with block l skipped - loss, in nats per token, for every block l; ``blocks_BT`` is (windows, T + 1) token ids.

    Everything before the skipped block is reused: L (L - 1) / 2 blocks are run in all, not L (L - 1).
    """
    sums = [losses_of(model, windows_BT) for windows_BT in blocks_BT.split(MICRO_BATCH)]
    full, *skipped = (sum(losses) / blocks_BT[:, 1:].numel() for losses in zip(*sums, strict=True))
    return [loss - full for loss in skipped]


def losses_of(model: LanguageModel, blocks_BT: torch.Tensor) -> list[float]:
    """Summed loss in nats of some windows: of the whole model, then with each block left out."""
    inputs_BT, targets_BT = blocks_BT[:, :-1], blocks_BT[:, 1:]
    n_layer = len(model.blocks)

    def loss(state) -> float:
        return F.cross_entropy(model.logits(state).float().flatten(0, 1), targets_BT.flatten(), reduction="sum").item()

    states = [model.embed(inputs_BT)]
    for block in range(n_layer):
        states.append(model.run(states[-1], block, block + 1))
    left_out = (model.run(model.residual.skip(states[block], block=block), block + 1, n_layer) for block in range(n_layer))
    return [loss(states[-1]), *map(loss, left_out)]


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
