"""Layer statistics during training (spec: "In training"): what every block adds, and what the loss says about it.

At a sampled step, for every block and the sites block_out (the depth state after the block), attn_branch and ffn_branch (the terms
that are added): mean, variance, mean absolute value (magnitude) and L2 norm, of the values (forward) and of the gradient of the
step's mean loss on them (backward); for block_out also the residual norm mean_tokens ||z|| / sqrt(width) and the cosine drift
1 - cos(z_l, z_{l+1}). Sums run over all micro-batches of the step and over all ranks, so they do not depend on the batching.
Nothing is attached on a step that is not sampled.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

import lightning as L
import torch

from depthbench.nn.model import LanguageModel
from depthbench.residuals.base import map_tensors

# Sums kept per (layer, site, direction), and for block_out forward the two token-wise ones.
MOMENTS = ("count", "sum", "sum_of_squares", "sum_of_magnitudes")
BRANCH_SITES = ("attn_branch", "ffn_branch")


class StepSums:
    """Streaming fp32 sums of one optimizer step. One flat (keys, 4) tensor at the end, so that ranks reduce with one call."""

    def __init__(self):
        self.moments: dict[tuple[int, str, str], torch.Tensor] = {}
        self.tokenwise: dict[tuple[int, str], torch.Tensor] = {}

    def add(self, key: tuple[int, str, str], values: torch.Tensor) -> None:
        """Add all elements of ``values``, any shape."""
        values = values.detach().float()
        sums = torch.stack([values.new_tensor(values.numel()), values.sum(), values.square().sum(), values.abs().sum()])
        self.moments[key] = self.moments[key] + sums if key in self.moments else sums

    def add_tokens(self, key: tuple[int, str], per_token: torch.Tensor) -> None:
        """Add one number per token."""
        sums = torch.stack([per_token.new_tensor(per_token.numel()), per_token.sum()])
        self.tokenwise[key] = self.tokenwise[key] + sums if key in self.tokenwise else sums

    def reduce(self, strategy) -> None:
        """Sum over all ranks."""
        for sums in (self.moments, self.tokenwise):
            keys = sorted(sums)
            for key, row in zip(keys, strategy.reduce(torch.stack([sums[k] for k in keys]), reduce_op="sum"), strict=True):
                sums[key] = row

    def rows(self) -> list[dict]:
        """Rows of the store's layer_stats table, without step and tokens."""
        rows = []
        for (layer, site, direction), sums in self.moments.items():
            count, total, squares, magnitudes = sums.double().tolist()
            mean = total / count
            metrics = {
                "mean": mean,
                "variance": max(0.0, squares / count - mean * mean),
                "magnitude": magnitudes / count,
                "norm": squares**0.5,
            }
            rows += [
                {"layer": layer, "site": site, "direction": direction, "metric": name, "value": value} for name, value in metrics.items()
            ]
        for (layer, metric), sums in self.tokenwise.items():
            count, total = sums.double().tolist()
            rows.append({"layer": layer, "site": "block_out", "direction": "forward", "metric": metric, "value": total / count})
        return rows


class LayerStatistics(L.Callback):
    """Records layer statistics at step 1, every ``every_n_steps`` optimizer steps, and at the last one.

    ``sink(table, rows)`` receives the rows; ``tokens_per_step`` and ``last_step`` come from the plan.
    """

    def __init__(self, sink, *, every_n_steps: int, tokens_per_step: int, last_step: int):
        self.sink, self.every_n_steps, self.tokens_per_step, self.last_step = sink, every_n_steps, tokens_per_step, last_step
        self._sums: StepSums | None = None  # only while a sampled step is under way
        self._observer: Observer | None = None
        self._attached = ExitStack()

    def sampled(self, step: int) -> bool:
        """Whether optimizer step ``step`` (counted from 1) is recorded."""
        return self.every_n_steps > 0 and (step == 1 or step % self.every_n_steps == 0 or step == self.last_step)

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if not self.sampled(trainer.global_step + 1):
            return
        if self._sums is None:
            self._sums = StepSums()
        self._observer = Observer(module.model, self._sums, trainer.world_size)
        self._attached.enter_context(module.model.taps(self._observer))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if self._sums is None:
            return
        self._attached.close()
        self._observer.finish()
        self._observer = None
        if trainer.fit_loop._should_accumulate():
            return
        sums, self._sums = self._sums, None
        sums.reduce(trainer.strategy)
        step = trainer.global_step
        if trainer.is_global_zero:
            self.sink("layer_stats", [{"step": step, "tokens": step * self.tokens_per_step, **row} for row in sums.rows()])

    def on_exception(self, trainer, module, exception) -> None:
        self._attached.close()


class Observer:
    """A tap that adds what one micro-batch shows to the step's sums."""

    def __init__(self, model: LanguageModel, sums: StepSums, world_size: int):
        self.model, self.sums, self.world_size = model, sums, world_size
        self._before: torch.Tensor | None = None
        self._states: list[tuple[int, NamedTuple]] = []
        self._gradients: dict[int, torch.Tensor] = {}

    def __call__(self, name: str, sublayer: int, value) -> None:
        block, feed_forward = divmod(sublayer, 2)
        if name == "branch_out":
            self._watch((block, BRANCH_SITES[feed_forward]), value)
        elif name == "state_in" and sublayer == 0:
            self._before = self.model.residual.depth_state(value, block=0).detach()
        elif name == "state_out" and feed_forward:
            self._block_out(block, value)

    def _block_out(self, block: int, state) -> None:
        after = self.model.residual.depth_state(state, block=block + 1)
        self.sums.add((block, "block_out", "forward"), after)
        self._tokenwise(block, after.detach().float())
        self._watch_state_gradient(block, state)

    def _tokenwise(self, block: int, after: torch.Tensor) -> None:
        norm = after.norm(dim=-1)
        self.sums.add_tokens((block, "residual_norm"), norm / after.shape[-1] ** 0.5)
        self.sums.add_tokens((block, "cosine_drift"), 1.0 - torch.cosine_similarity(self._before.float(), after, dim=-1))
        self._before = after

    def _watch(self, site: tuple[int, str], value: torch.Tensor) -> None:
        self.sums.add((*site, "forward"), value)
        if value.requires_grad:
            value.register_hook(lambda gradient: self.sums.add((*site, "backward"), gradient / self.world_size))

    def _watch_state_gradient(self, block: int, state) -> None:
        self._states.append((block, map_tensors(self._watch_tensor, state)))

    def _watch_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        key = id(tensor)  # stays its own: self._states keeps the tensor alive
        if key not in self._gradients:
            self._gradients[key] = tensor.new_zeros(()).expand_as(tensor)  # what stands where nothing reads the tensor
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._gradients.update({key: gradient}))
        return tensor

    def finish(self) -> None:
        """After backward: the gradient on each depth state, from those on the tensors of its state."""
        for block, state in self._states:
            gradients = map_tensors(lambda tensor: self._gradients[id(tensor)], state)
            depth_gradient = self.model.residual.depth_gradient(gradients, block=block + 1)
            self.sums.add((block, "block_out", "backward"), depth_gradient / self.world_size)
