"""What each probe found, in a line: the summary that ``depthbench probe`` prints."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

WITHIN = 1.1  # times the model's own loss: from there on an early exit is close to it

Lookup = Callable[[str], pd.DataFrame]  # a metric -> its rows, by i and j


def headline(probe: str, rows: pd.DataFrame) -> str:
    """The line for the rows of one measurement: its numbers, and what is not defined for the design, with the reason."""
    ok = rows[rows["status"] == "ok"].sort_values(["i", "j"])
    said = [LINES[probe](lambda metric: ok[ok["metric"] == metric])] if len(ok) else []
    for reason, group in rows[rows["status"] == "not_defined"].groupby("note", sort=False):
        what = f"{', '.join(group['metric'])} " if len(ok) else ""
        said.append(f"{what}not defined: {reason}")
    return "; ".join(said)


def _norms(of: Lookup) -> str:
    norms, drift = of("residual_norm")["value"], 1 - of("cosine_next")["value"]
    return f"norm / sqrt(width) {norms.iloc[0]:.3g} at the embedding, {norms.iloc[-1]:.3g} at the end; mean drift {drift.mean():.3g}"


def _angular(of: Lookup) -> str:
    pairs = of("distance")
    neighbours = pairs.loc[pairs["j"] == pairs["i"] + 1, "value"].mean()
    return f"neighbours {neighbours:.3g} half turns apart on average, all pairs {pairs['value'].mean():.3g}"


def _logit_lens(of: Lookup) -> str:
    losses = of("loss")
    final = losses["value"].iloc[-1]
    stay = int((losses["value"] <= WITHIN * final).iloc[::-1].cumprod().sum())  # how many from the end on, one after the other, are close
    where = f"within 10 % of it from boundary {len(losses) - stay} of {len(losses) - 1}" if stay else "NaN among the losses"
    return f"loss {final:.4f}; {where}"


def _collapse(of: Lookup) -> str:
    return f"at the end stable rank {of('stable_rank')['value'].iloc[-1]:.3g}, effective rank {of('effective_rank')['value'].iloc[-1]:.3g}"


def _paths(of: Lookup) -> str:
    weights = of("weight")
    last = weights[weights["j"] == weights["j"].max()]["value"]
    return f"the readout weighs the embedding {last.iloc[0]:.3g}, the last sublayer {last.iloc[-1]:.3g}"


def _transport(of: Lookup) -> str:
    ranks, dead = of("effective_rank"), of("dead_segment")["value"]
    if len(ranks):
        whole = ranks[(ranks["i"] == ranks["i"].min()) & (ranks["j"] == ranks["j"].max())]["value"]
        return f"effective rank {whole.iloc[0]:.3g} from the first block to the last"
    return f"dead segment {dead.iloc[0]:.0f} blocks" if len(dead) else f"{len(of('depth_weight'))} depth weights"


def _pairs_above(threshold: float) -> Callable[[Lookup], str]:
    def line(of: Lookup) -> str:
        mean, late = of("mean")["value"], of("late_fraction")["value"]
        said = [f"mean {value:.3g}" for value in mean] + [f"{value:.0%} of late pairs above {threshold}" for value in late.dropna()]
        return "; ".join(said) or f"{len(of('score'))} pairs of blocks"

    return line


def _pruning(of: Lookup) -> str:
    deltas = of("delta").set_index("i")["value"]
    if not deltas.notna().any():
        return "NaN wherever a block is left out"
    ends = [(deltas.max(), deltas.idxmax()), (deltas.min(), deltas.idxmin())]
    return "a block left out costs " + " to ".join(f"{value:+.3g} nats (block {int(block)})" for value, block in ends)


def _jacobian(of: Lookup) -> str:
    deviations, errors = of("deviation")["value"], of("stderr")["value"]
    estimated = f", estimated with standard errors up to {errors.max():.2g}" if len(errors) else ""
    return f"mean deviation from the identity {deviations.mean():.3g}{estimated}"


def _usefulness(of: Lookup) -> str:
    ratios = of("loss_ratio")["value"]
    if not ratios.notna().any():
        return "NaN wherever a map stands in for a block"
    return f"{of('useful_fraction')['value'].iloc[0]:.0%} of {ratios.count()} blocks useful; median loss ratio {ratios.median():.3f}"


LINES: dict[str, Callable[[Lookup], str]] = {
    "norms": _norms,
    "angular": _angular,
    "logit_lens": _logit_lens,
    "collapse": _collapse,
    "paths": _paths,
    "transport": _transport,
    "causal": _pairs_above(0.45),
    "pruning": _pruning,
    "jacobian": _jacobian,
    "usefulness": _usefulness,
    "permutation": _pairs_above(0.15),
}
