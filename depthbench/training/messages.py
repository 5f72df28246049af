"""What a run says on the terminal: at its start, at its end, and how to go on."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np

from depthbench import shapes
from depthbench.corpora import Card
from depthbench.store.reader import Store
from depthbench.training import checkpoints
from depthbench.training.plan import Plan

BEYOND = ", beyond the budget's tolerance"


def announcement(plan: Plan, folder: Path, resumed_from: int | None) -> str:
    """What is about to run."""
    shape, card = plan.shape, plan.card
    lines = [
        f"{plan.experiment.arch} {plan.experiment.size}: {shape.n_layer} layers x {shape.d_model} (ratio {shape.ratio:.2f}, "
        f"{plan.ratio_requested:g} asked), {plan.params_total:,} parameters{BEYOND if plan.over_budget else ''}",
        f"corpus {card.corpus}: {card.train.blocks * plan.seq_len:,} training tokens, {plan.val_blocks * plan.seq_len:,} held out to "
        f"validate on; unigram entropy {card.unigram_entropy:.3f} nats",
        f"plan: {plan.last_step:,} of {plan.steps:,} steps x {plan.batch_tokens:,} tokens, "
        f"peak learning rate {plan.lr:g}, {plan.precision}",
        f"run folder: {folder}",
    ]
    if resumed_from is not None:
        lines.append(f"going on from the checkpoint at step {resumed_from}")
    return "\n".join(lines)


def summary(runs: Path, run_id: str, card: Card) -> str:
    """What a finished run achieved, and where to look at it."""
    row = Store(runs).runs().set_index("run_id").loc[run_id]
    with np.errstate(over="ignore"):
        perplexity = np.exp(row.val_loss)
    facts = {
        "validation loss": f"{row.val_loss:.4f} nats per token (the corpus's unigram entropy is {card.unigram_entropy:.4f})",
        "perplexity": f"{perplexity:.2f}",
        "shape": f"{row.n_layer} layers x {row.d_model}, {row.n_head} heads of {row.head_dim}, d_ff {row.d_ff}, ratio {row.ratio:.2f}",
        "parameters": f"{row.params_total:,} ({row.params_backbone:,} in the backbone){BEYOND if beyond(row) else ''}",
        "tokens": f"{whole(row.tokens_done)} in {whole(row.step)} steps",
        "time": duration(row.wall_s),
        "run folder": str(runs / run_id),
        "dashboard": f"depthbench app{runs_flag(runs)}",
    }
    return "\n".join(f"{name + ':':<17}{value}" for name, value in facts.items())


def whole(number: float) -> str:
    """A count as recorded; what was recorded may since have been damaged or removed."""
    return "?" if np.isnan(number) else f"{int(number):,}"


def how_to_go_on(folder: Path) -> str:
    """What the same command would do now."""
    steps = checkpoints.steps(folder)
    if not steps:
        return "It has no checkpoint yet: the same command starts it over."
    return f"Repeat the same command, or `{resume_command(folder)}`: it goes on from the checkpoint at step {steps[-1]}."


def last_good(folder: Path) -> str:
    """What of a diverged run is worth going back to, and what to do about it."""
    steps, mend = checkpoints.steps(folder), "use a smaller --lr or another --recipe, or --fresh to start over"
    if not steps:
        return f"it had no checkpoint yet; {mend}"
    return f"the checkpoint at step {steps[-1]}, before it, is kept; {mend}, or `{resume_command(folder)}` to try again from there"


def resume_command(folder: Path) -> str:
    return f"depthbench resume {folder.name}{runs_flag(folder.parent)}"


def beyond(row) -> bool:
    """Whether a recorded run's model is larger than its size's budget and tolerance allow."""
    counted = row.params_total if row.budget == "total" else row.params_backbone
    return counted > row.budget_params * (1 + shapes.size_named(row["size"]).tolerance)


def runs_flag(runs: Path) -> str:
    """`` --runs DIR`` where the folder is not the default one."""
    return "" if Path(runs) == Path("runs") else f" --runs {shlex.quote(str(runs))}"


def duration(seconds: float) -> str:
    """1 h 02 min 03 s, without the parts that are zero in front; ? for NaN."""
    if np.isnan(seconds):
        return "?"
    hours, rest = divmod(round(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    parts = [f"{hours} h"] * (hours > 0) + [f"{minutes:02d} min" if hours else f"{minutes} min"] * (hours > 0 or minutes > 0)
    return " ".join([*parts, f"{rest:02d} s" if parts else f"{rest} s"])
