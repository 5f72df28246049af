"""From what a user asks (Experiment) to everything that decides a run (Plan)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from depthbench import corpora, recipes, residuals, shapes
from depthbench.errors import UserError
from depthbench.nn.model import refuse_out_of_range
from depthbench.probes import runner
from depthbench.recipes import Recipe
from depthbench.shapes import Shape, positive
from depthbench.store.folder import refuse_unwritable
from depthbench.store.runs import run_id

# On the windows of training/final_probes.py they take 1.2 % (5 layers) to 2.6 % (21) of a nano run's time, 5.1 % where blocks are left out
# by two rules; the Jacobian alone would take 20 %. The share of a pico run is smaller.
PROBED_SIZES = ("pico", "nano")
CHEAP_PROBES = ("norms", "angular", "logit_lens", "collapse", "paths", "transport", "causal", "pruning")


@dataclass(frozen=True)
class Experiment:
    """What a user asks for. ``None`` means: as the size or the recipe says."""

    arch: str = "pre_ln"
    options: dict[str, Any] = field(default_factory=dict)  # of the design
    size: str = "nano"
    ratio: float | None = None
    budget: str = "total"
    tokens: int | None = None
    lr: float | None = None
    seed: int = 42
    seq_len: int | None = None
    batch_tokens: int | None = None
    micro_batch: int | None = None
    corpus: str | None = None
    tokenizer: str | None = None
    recipe: str = "paper"
    count_extras: bool = False
    compile: bool = False
    workers: int = 0
    loader_timeout: int = 300  # seconds; 0: none
    validations: int = 5
    layer_stats_every: int = 10
    probes: str = "auto"
    runs: str = "runs"


@dataclass(frozen=True)
class Plan:
    """Everything that decides a run, resolved: three counts stay apart, tokens, optimizer steps and micro-batches."""

    experiment: Experiment
    options: dict[str, Any]  # of the design, every one
    options_chosen: dict[str, Any]  # those that are not its defaults
    shape: Shape
    recipe: Recipe
    lr: float
    ratio_requested: float
    budget_params: int
    params_extra: int
    flops_extra: int  # of a sequence's forward pass, beyond Pre-LN's
    seq_len: int
    sequences_per_step: int
    micro_batch: int
    accumulation: int
    steps: int
    max_steps: int
    precision: str
    val_blocks: int
    validations: int
    probes: list[str]  # that the run ends with
    corpus: Path | str  # a folder, or the URL of one
    card: corpora.Card = field(repr=False)

    @property
    def batch_tokens(self) -> int:
        """Tokens predicted per optimizer step."""
        return self.sequences_per_step * self.seq_len

    @property
    def tokens(self) -> int:
        """Tokens that the schedule is planned for."""
        return self.steps * self.batch_tokens

    @property
    def last_step(self) -> int:
        """The step at which the run ends: the planned last one, or ``--trainer.max_steps`` where that comes first."""
        return min(self.steps, self.max_steps) if self.max_steps > 0 else self.steps

    @property
    def params_total(self) -> int:
        return self.shape.params_total + self.params_extra

    @property
    def flops_per_token(self) -> float:
        """FLOPs of one training token, the design's own included (backward costs twice the forward)."""
        return shapes.flops_per_token_train(self.shape, self.seq_len) + 3 * self.flops_extra / self.seq_len

    @property
    def over_budget(self) -> bool:
        """Whether the design's own parameters take the model out of the size's tolerance."""
        return shapes.over_budget(self.shape, self.experiment.size, self.params_extra, self.experiment.budget)

    @property
    def decides(self) -> dict[str, Any]:
        """Exactly what decides the result (store.md, "Run ids"): two runs that agree in it are the same run."""
        asked, shape = self.experiment, self.shape
        return {
            "arch": asked.arch,
            "options": self.options_chosen,
            **asdict(shape),
            "corpus_fingerprint": self.card.fingerprint,
            "recipe": asdict(self.recipe),
            "lr": self.lr,
            "seq_len": self.seq_len,
            "batch_tokens": self.batch_tokens,
            "tokens_planned": self.tokens,
            "max_steps": self.last_step,
            "seed": asked.seed,
            "precision": self.precision,
        }

    @property
    def run_id(self) -> str:
        """Readable prefix and a hash over what decides the result."""
        return run_id({**self.decides, "size": self.experiment.size})


def resolve(asked: Experiment, *, precision: str = "32-true", max_steps: int = -1, world_size: int = 1) -> Plan:
    """Solve the shape, find or prepare the corpus, and plan the steps.

    Raises UserError with one line for every value that cannot be: unknown names, a shape out of reach, a batch that does not divide.
    """
    check(asked, max_steps)
    probes = final_probes(asked.probes, asked.size)
    design, recipe = residuals.get(asked.arch), recipes.recipe(asked.recipe)
    options = residuals.checked_options(design, {**recipes.design_options(asked.arch, asked.recipe), **asked.options})
    size = shapes.size_named(asked.size)
    refuse_out_of_range(design, options, size.shape(*size.base))
    ratio = size.ratio if asked.ratio is None else asked.ratio
    params_extra = partial(design.params_extra, **options)
    shape = shapes.solve_shape(size, ratio, budget=asked.budget, params_extra=params_extra if asked.count_extras else None)
    seq_len, batch_tokens = asked.seq_len or size.seq_len, asked.batch_tokens or size.batch_tokens
    sequences, micro_batch = batching(batch_tokens, seq_len, asked.micro_batch, at_most=size.micro_batch, world_size=world_size)
    tokens = asked.tokens or size.tokens
    steps = tokens // (sequences * seq_len)
    if steps == 0:
        step = sequences * seq_len
        raise UserError(f"--tokens {tokens} is less than one step of {step} tokens: ask for more tokens or a smaller --batch-tokens")

    tokenizer = asked.tokenizer or size.tokenizer
    folder = corpora.ensure(asked.corpus or size.corpus, tokenizer=tokenizer, seq_len=seq_len, val_tokens=size.val_tokens)
    card = corpora.read_card(folder)
    corpora.check_compatible(card, vocab_size=shape.vocab_size, seq_len=seq_len, tokenizer=tokenizer)
    if isinstance(folder, Path):
        folder = folder.absolute()
        corpora.verify(folder)  # a flipped byte would be a token like any other
    return Plan(
        experiment=asked,
        options=options,
        options_chosen=residuals.chosen_options(design, options),
        shape=shape,
        recipe=recipe,
        lr=asked.lr or recipes.learning_rate(size, asked.arch, asked.recipe),
        ratio_requested=ratio,
        budget_params=size.budgets[asked.budget],
        params_extra=params_extra(shape),
        flops_extra=design.flops_extra(shape, seq_len, **options),
        seq_len=seq_len,
        sequences_per_step=sequences,
        micro_batch=micro_batch,
        accumulation=sequences // (micro_batch * world_size),
        steps=steps,
        max_steps=max_steps,
        precision=precision,
        val_blocks=min(max(1, size.val_tokens // seq_len), card.val.blocks),
        validations=asked.validations,
        probes=probes,
        corpus=folder,
        card=card,
    )


def check(asked: Experiment, max_steps: int) -> None:
    """Refuse numbers that make no run, naming the flag."""
    for name in ("tokens", "lr", "seq_len", "batch_tokens", "micro_batch", "validations"):
        if getattr(asked, name) is not None:
            positive(f"--{name.replace('_', '-')}", getattr(asked, name))
    if not asked.runs.strip():
        raise UserError("--runs is empty: give the name of a folder")
    refuse_unwritable(Path(asked.runs))
    for name in ("seed", "workers", "loader_timeout", "layer_stats_every"):
        if getattr(asked, name) < 0:
            raise UserError(f"--{name.replace('_', '-')} cannot be negative, as {getattr(asked, name)} is: use 0 or more")
    if max_steps == 0 or max_steps < -1:
        raise UserError(f"--trainer.max_steps {max_steps} trains nothing: give a number of steps, or -1 for the whole plan")


def final_probes(asked: str, size: str) -> list[str]:
    """The probes that ``--probes`` means: ``none``, a list as of `depthbench probe`, or ``auto``: the cheap ones at the small sizes."""
    if asked == "auto":
        return list(CHEAP_PROBES) if size in PROBED_SIZES else []
    return [] if asked == "none" else runner.chosen(asked)


def batching(batch_tokens: int, seq_len: int, micro_batch: int | None, *, at_most: int, world_size: int) -> tuple[int, int]:
    """(sequences per optimizer step, sequences per forward) for a batch given in tokens.

    Where no micro-batch is asked for, the largest of up to ``at_most`` sequences that divides a rank's share is taken.
    """
    sequences, rest = divmod(batch_tokens, seq_len)
    if rest or sequences == 0:
        raise UserError(
            f"--batch-tokens {batch_tokens} is not a multiple of the sequence length {seq_len}: use {max(1, sequences) * seq_len}"
        )
    share, rest = divmod(sequences, world_size)
    if rest:
        raise UserError(f"a step of {sequences} sequences cannot be shared by {world_size} processes: choose another --batch-tokens")
    if micro_batch is None:
        return sequences, max(count for count in range(1, min(at_most, share) + 1) if share % count == 0)
    if share % micro_batch:
        raise UserError(f"--micro-batch {micro_batch} does not divide the {share} sequences of a step: use a divisor of {share}")
    return sequences, micro_batch


def run_row(plan: Plan) -> dict:
    """The columns of the store's ``run`` table that the plan decides."""
    asked, shape = plan.experiment, plan.shape
    return {
        "run_id": plan.run_id,
        "arch": asked.arch,
        "options": json.dumps(plan.options_chosen, sort_keys=True),
        "recipe": plan.recipe.name,
        "size": asked.size,
        "budget": asked.budget,
        "ratio": shape.ratio,
        "ratio_requested": plan.ratio_requested,
        **{column: getattr(shape, column) for column in ("n_layer", "d_model", "n_head", "n_kv_head", "head_dim", "d_ff", "vocab_size")},
        "params_total": plan.params_total,
        "params_backbone": shape.params_backbone + plan.params_extra,
        "params_extra": plan.params_extra,
        "budget_params": plan.budget_params,
        "seq_len": plan.seq_len,
        "batch_tokens": plan.batch_tokens,
        "tokens_planned": plan.tokens,
        "lr": plan.lr,
        "seed": asked.seed,
        "corpus": asked.corpus or shapes.size_named(asked.size).corpus,
        "corpus_fingerprint": plan.card.fingerprint,
        "tokenizer": plan.card.tokenizer,
        "precision": plan.precision,
    }
