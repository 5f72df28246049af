"""The LightningModule: one training step, the fixed validation set, AdamW with a warmup-cosine schedule.

Source of the recipe: arXiv 2609.32534, as kept in conf/recipes.yaml. It knows no design by name.
"""

from __future__ import annotations

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanMetric

from depthbench.recipes import Recipe
from depthbench.training.schedule import learning_rate_factor


def next_token_loss(model: nn.Module, blocks_BT: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Cross entropy in nats of predicting tokens 1..T of each block from the tokens before them.

    ``blocks_BT`` is (sequences, T + 1) token ids; logits are reduced in fp32. ``reduction`` as in torch's ``cross_entropy``.
    """
    logits_BTV = model(blocks_BT[:, :-1])
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

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return self.model(tokens_BT)

    def training_step(self, blocks_BT: torch.Tensor) -> torch.Tensor:
        return next_token_loss(self.model, blocks_BT)

    def validation_step(self, blocks_BT: torch.Tensor) -> None:
        losses = next_token_loss(self.model, blocks_BT, reduction="none").double()
        self.val_loss.update(losses.mean(), weight=losses.numel())

    def on_validation_epoch_end(self) -> None:
        loss = self.val_loss.compute()
        self.val_loss.reset()
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
        limit = float("inf") if gradient_clip_val is None else float(gradient_clip_val)
        self.grad_norm = nn.utils.clip_grad_norm_(self.parameters(), limit).detach()
        self.grad_norm_clipped = self.grad_norm.clamp(max=limit)
