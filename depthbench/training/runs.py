"""Loading a run that was trained: its facts, its model, its held-out data; and validating it again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import lightning as L
from torch.utils.data import Dataset

from depthbench import corpora
from depthbench.errors import UserError
from depthbench.nn.model import LanguageModel, build_model
from depthbench.recipes import Recipe
from depthbench.store.reader import read_run
from depthbench.store.runs import find_run
from depthbench.training import checkpoints
from depthbench.training.data import CorpusDataModule
from depthbench.training.module import LanguageModelingModule

SHAPE_COLUMNS = ("n_layer", "d_model", "n_head", "n_kv_head", "d_ff", "vocab_size")


@dataclass(frozen=True)
class Run:
    """A run folder opened for reading: ``row`` holds the columns of the store's ``run`` table, ``config`` what was resolved."""

    folder: Path
    row: dict
    checkpoint: Path

    @property
    def run_id(self) -> str:
        return self.row["run_id"]

    @property
    def step(self) -> int:
        """The optimizer step of the checkpoint."""
        return checkpoints.step_of(self.checkpoint)

    @cached_property
    def config(self) -> dict:
        return json.loads(self.row["config"])

    @cached_property
    def model(self) -> LanguageModel:
        """The model of the checkpoint, in eval mode on the CPU."""
        shape = {name: int(self.row[name]) for name in SHAPE_COLUMNS}
        recipe = Recipe(**self.config["recipe"])
        model = build_model(self.row["arch"], **shape, **recipe.model_kwargs(), **self.config.get("options", {}))
        weights = checkpoints.weights(self.checkpoint)
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            differs = next((line.strip().rstrip(".") for line in str(error).splitlines()[1:]), str(error))
            raise UserError(
                f"checkpoint {self.checkpoint} does not fit design {self.row['arch']} as it is now ({differs[:200]}): "
                "bring back the code it was trained with, or train again with --fresh"
            ) from error
        return model.eval()

    @cached_property
    def data(self) -> CorpusDataModule:
        """The corpus the run was trained on, refused where it has changed since."""
        facts = self.config["data"]
        card = corpora.read_card(facts["folder"])
        if card.fingerprint != self.row["corpus_fingerprint"]:
            raise UserError(
                f"corpus {facts['folder']} has changed since run {self.run_id}: its fingerprint is {card.fingerprint}, "
                f"the run's {self.row['corpus_fingerprint']}; prepare the run's corpus again"
            )
        settings = {name: facts[name] for name in ("steps", "micro_batch", "accumulation", "val_blocks")}
        return CorpusDataModule(facts["folder"], seed=int(self.row["seed"]), **settings)

    @cached_property
    def held_out(self) -> Dataset:
        """The fixed validation blocks: LongTensors (T + 1,)."""
        return self.data.val_dataset()


def load_run(ref: str | Path, *, runs: str | Path = "runs", step: int | None = None) -> Run:
    """Open a run by its id, a unique prefix of it, or its folder, at its newest checkpoint or the one of ``step``.

    Raises UserError where there is no such run or checkpoint.
    """
    folder = find_run(Path(runs), str(ref))
    checkpoint = checkpoints.required(folder) if step is None else checkpoints.path(folder, step)
    if not checkpoint.exists():
        known = ", ".join(str(at) for at in checkpoints.steps(folder))
        raise UserError(f"run {folder.name} has no checkpoint at step {step}: it has {known or 'none'}")
    return Run(folder, read_run(folder), checkpoint)


def validate(ref: str, *, runs: str | Path = "runs") -> dict[str, float]:
    """val/loss (nats per token) and val/perplexity of a run's newest checkpoint, by the same code as in training."""
    run = load_run(ref, runs=runs)
    recipe = Recipe(**run.config["recipe"])
    module = LanguageModelingModule(run.model, recipe=recipe, lr=run.row["lr"], total_steps=run.config["data"]["steps"])
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False, "enable_progress_bar": False}
    trainer = L.Trainer(devices=1, precision=run.row["precision"], use_distributed_sampler=False, **quiet)
    trainer.validate(module, datamodule=run.data, verbose=False)
    return {name: trainer.callback_metrics[name].item() for name in ("val/loss", "val/perplexity")}
