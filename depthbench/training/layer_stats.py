"""Layer statistics during training (spec: "In training"): what every block adds, and what the loss says about it.

At a sampled step, for every block and the sites block_out (the depth state after the block), attn_branch and ffn_branch (the terms
that are added): mean, variance, mean absolute value (magnitude) and L2 norm, of the values (forward) and of the gradient of the
step's mean loss on them (backward); for block_out also the residual norm mean_tokens ||z|| / sqrt(width) and the cosine drift
1 - cos(z_l, z_{l+1}). Sums run over all micro-batches of the step and over all ranks, so they do not depend on the batching.
Nothing is attached on a step that is not sampled.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import ExitStack
from typing import NamedTuple

import lightning as L
import torch

from depthbench.nn.model import LanguageModel
from depthbench.residuals.base import map_tensors
from depthbench.training.module import step_done

BRANCH_SITES = ("attn_branch", "ffn_branch")


class StepSums:
    """Sums of one optimizer step: a few 0-dim fp32 tensors per micro-batch and key, brought together once, at the end, in fp64.

    A key is (layer, site, direction), with the sum, L2 norm and L1 norm over all elements, or (layer, metric), with a sum over tokens.
    """

    def __init__(self):
        self.parts: dict[tuple, list[torch.Tensor]] = defaultdict(list)
        self.counts: Counter[tuple] = Counter()

    def add(self, key: tuple[int, str, str], values: torch.Tensor) -> None:
        """Add all elements of ``values``, any shape; the fused norms make no copy of it."""
        values, norm = values.detach(), torch.linalg.vector_norm
        self.parts[key] += [values.sum(dtype=torch.float32), norm(values, 2, dtype=torch.float32), norm(values, 1, dtype=torch.float32)]
        self.counts[key] += values.numel()

    def add_tokens(self, key: tuple[int, str], per_token: torch.Tensor) -> None:
        """Add one number per token."""
        self.parts[key].append(per_token.sum(dtype=torch.float32))
        self.counts[key] += per_token.numel()

    def totals(self, strategy) -> dict[tuple, tuple[float, ...]]:
        """(count, sum, sum of squares, sum of magnitudes) per key, over micro-batches and ranks; the last two 0 for token metrics."""
        flat = iter(torch.stack([part for parts in self.parts.values() for part in parts]).tolist())
        rows = []
        for key, parts in self.parts.items():
            values = [next(flat) for _ in parts]
            sums = (values[0::3], [norm * norm for norm in values[1::3]], values[2::3]) if len(key) == 3 else (values, [], [])
            rows.append([self.counts[key], *map(sum, sums)])
        rows = strategy.reduce(torch.tensor(rows, dtype=torch.float64, device=strategy.root_device), reduce_op="sum").tolist()
        return dict(zip(self.parts, map(tuple, rows), strict=True))

    def rows(self, strategy, world_size: int) -> list[dict]:
        """Rows of the store's layer_stats table, without step and tokens."""
        rows = []
        for key, (count, total, squares, magnitudes) in self.totals(strategy).items():
            layer, site, direction = key if len(key) == 3 else (key[0], "block_out", "forward")
            # A rank's gradients are those of its own mean loss; the step's loss is the mean over ranks.
            share = 1 / world_size if direction == "backward" else 1.0
            metrics = {key[1]: total / count} if len(key) == 2 else moments(count, share * total, share**2 * squares, share * magnitudes)
            at = {"layer": layer, "site": site, "direction": direction}
            rows += [{**at, "metric": metric, "value": value} for metric, value in metrics.items()]
        return rows


def moments(count: float, total: float, squares: float, magnitudes: float) -> dict[str, float]:
    mean = total / count
    variance = max(0.0, squares / count - mean * mean)
    return {"mean": mean, "variance": variance, "magnitude": magnitudes / count, "norm": squares**0.5}


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
        self._observer = Observer(module.model, self._sums)
        self._attached.enter_context(module.model.taps(self._observer))

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if self._sums is None:
            return
        self._attached.close()
        self._observer.finish()
        self._observer = None
        if not step_done(trainer):
            return
        sums, self._sums = self._sums, None
        rows, step = sums.rows(trainer.strategy, trainer.world_size), trainer.global_step
        if trainer.is_global_zero:
            self.sink("layer_stats", [{"step": step, "tokens": step * self.tokens_per_step, **row} for row in rows])

    def on_exception(self, trainer, module, exception) -> None:
        self._attached.close()


class Observer:
    """A tap that adds what one micro-batch shows to the step's sums."""

    def __init__(self, model: LanguageModel, sums: StepSums):
        self.model, self.sums = model, sums
        self._before: tuple[torch.Tensor, torch.Tensor] | None = None  # the last depth state and its norms
        self._states: list[tuple[int, NamedTuple]] = []
        self._gradients: dict[int, torch.Tensor] = {}

    def __call__(self, name: str, sublayer: int, value) -> None:
        block, feed_forward = divmod(sublayer, 2)
        if name == "branch_out":
            self._watch((block, BRANCH_SITES[feed_forward]), value)
        elif name == "state_in" and sublayer == 0:
            opened = self.model.residual.depth_state(value, block=0).detach().float()
            self._before = opened, torch.linalg.vector_norm(opened, dim=-1)
        elif name == "state_out" and feed_forward:
            self._block_out(block, value)

    def _block_out(self, block: int, state) -> None:
        after = self.model.residual.depth_state(state, block=block + 1)
        self.sums.add((block, "block_out", "forward"), after)
        self._tokenwise(block, after.detach().float())
        self._watch_state_gradient(block, state)

    def _tokenwise(self, block: int, after: torch.Tensor) -> None:
        norm = torch.linalg.vector_norm(after, dim=-1)
        (before, norm_before), self._before = self._before, (after, norm)
        self.sums.add_tokens((block, "residual_norm"), norm / after.shape[-1] ** 0.5)
        self.sums.add_tokens((block, "cosine_drift"), 1.0 - torch.linalg.vecdot(before, after) / (norm_before * norm))

    def _watch(self, site: tuple[int, str], value: torch.Tensor) -> None:
        self.sums.add((*site, "forward"), value)
        if value.requires_grad:
            value.register_hook(lambda gradient: self.sums.add((*site, "backward"), gradient))

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
        """After backward: the gradient on each depth state, from those on the tensors of its state.

        Lets go of every tensor: the hooks on them hold this observer, and with it would keep the whole graph alive.
        """
        for block, state in self._states:
            gradients = map_tensors(lambda tensor: self._gradients[id(tensor)], state)
            self.sums.add((block, "block_out", "backward"), self.model.residual.depth_gradient(gradients, block=block + 1))
        self._states, self._gradients, self._before = [], {}, None
