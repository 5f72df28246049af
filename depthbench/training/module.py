"""The LightningModule: one training step, the fixed validation set, AdamW with a warmup-cosine schedule.

Source of the recipe: arXiv 2609.32534, as kept in conf/recipes.yaml. It knows no design by name.
"""

from __future__ import annotations

from collections.abc import Iterable

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanMetric

from depthbench.recipes import Recipe
from depthbench.training.divergence import Diverged, finite_everywhere, first_place
from depthbench.training.schedule import learning_rate_factor


def next_token_loss(model: nn.Module, blocks_BT: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Cross entropy in nats of predicting tokens 1..T of each block from the tokens before them.

    ``blocks_BT`` is (sequences, T + 1) token ids; logits are reduced in fp32. ``reduction`` as in torch's ``cross_entropy``.
    """
    return cross_entropy(model(blocks_BT[:, :-1]), blocks_BT, reduction)


def cross_entropy(logits_BTV: torch.Tensor, blocks_BT: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """``next_token_loss`` from the logits of the first T tokens."""
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), blocks_BT[:, 1:].flatten(), reduction=reduction)


def step_done(trainer: L.Trainer) -> bool:
    """Whether the micro-batch that just ended completed an optimizer step."""
    return not trainer.fit_loop._should_accumulate()


class LanguageModelingModule(L.LightningModule):
    """Trains ``model`` on blocks of token ids.

    Args:
        model: token ids (batch, time) to logits (batch, time, vocabulary), with ``parameter_groups(weight_decay, decay_vectors=)``.
        recipe: optimizer and schedule.
        lr: peak learning rate.
        total_steps: optimizer steps that the schedule is planned for; stopping earlier does not bend it.
    """

    def __init__(self, model: nn.Module, *, recipe: Recipe, lr: float, total_steps: int):
        super().__init__()
        self.model, self.recipe, self.lr, self.total_steps = model, recipe, lr, total_steps
        # fp64 sums: the mean over the fixed tokens must not depend on how they are batched.
        self.val_loss = MeanMetric().set_dtype(torch.float64)
        self.grad_norm: torch.Tensor | None = None
        self.grad_norm_clipped: torch.Tensor | None = None
        self._micro_batches: list[tuple[torch.Tensor, torch.Tensor]] = []  # of the step under way, with their losses

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return self.model(tokens_BT)

    def training_step(self, blocks_BT: torch.Tensor) -> torch.Tensor:
        loss = next_token_loss(self.model, blocks_BT)
        self._micro_batches.append((blocks_BT, loss.detach()))
        return loss

    def validation_step(self, blocks_BT: torch.Tensor) -> None:
        losses = next_token_loss(self.model, blocks_BT, reduction="none").double()
        self.val_loss.update(losses.mean(), weight=losses.numel())

    def on_validation_epoch_end(self) -> None:
        loss = self.val_loss.compute()
        self.val_loss.reset()
        if self.trainer.state.fn == "fit" and not finite_everywhere(self.trainer, loss):
            held_out = map(self.trainer.strategy.batch_to_device, self.trainer.val_dataloaders)
            raise Diverged(f"the validation loss after step {self.trainer.global_step} is {loss:g}", self._first_place(held_out))
        self.log_dict({"val/loss": loss, "val/perplexity": loss.exp()}, logger=False)

    def configure_optimizers(self) -> dict:
        recipe = self.recipe
        groups = self.model.parameter_groups(recipe.weight_decay, decay_vectors=recipe.decay_vectors)
        optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=tuple(recipe.betas), eps=recipe.eps)

        def factor(step: int) -> float:
            return learning_rate_factor(
                step, total_steps=self.total_steps, warmup_fraction=recipe.warmup_fraction, final_fraction=recipe.final_lr_fraction
            )

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None) -> None:
        parameters = [parameter for parameter in self.parameters() if parameter.grad is not None]
        self.grad_norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters]).detach()
        self._refuse_step()
        limit = float("inf") if gradient_clip_val is None else float(gradient_clip_val)
        nn.utils.clip_grads_with_norm_(parameters, limit, self.grad_norm)
        self.grad_norm_clipped = self.grad_norm.clamp(max=limit)

    def _refuse_step(self) -> None:
        """Raise ``Diverged``, before the optimizer step, where the step's loss or the norm of its gradient is not finite."""
        batches, losses = zip(*self._micro_batches, strict=True)
        self._micro_batches = []
        loss, step = torch.stack(losses).mean(), self.trainer.global_step + 1
        if finite_everywhere(self.trainer, loss + self.grad_norm):
            return
        name, value = ("gradient norm", self.grad_norm) if torch.isfinite(loss) else ("loss", loss)
        raise Diverged(f"the {name} of step {step} is {value:g}", self._first_place(batches, backward=True))

    def _first_place(self, batches: Iterable[torch.Tensor], *, backward: bool = False) -> str:
        with self.trainer.precision_plugin.train_step_context():
            return first_place(self.model.eager(), batches, cross_entropy, backward=backward)
