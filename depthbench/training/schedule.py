"""The learning-rate schedule of arXiv 2609.32534: linear warmup, then a cosine down to a final fraction of the peak."""

from __future__ import annotations

import math


def learning_rate_factor(step: int, *, total_steps: int, warmup_fraction: float, final_fraction: float) -> float:
    """Fraction of the peak learning rate used by optimizer step ``step``, counted from 0.

    Warmup gives ``(step + 1) / warmup_steps``, so the first step already moves and the peak is reached at the end of warmup
    (step ``warmup_steps - 1``); from there the cosine reaches exactly ``final_fraction`` at the last step. Steps beyond the plan
    keep the final fraction.
    """
    warmup_steps = max(1, round(warmup_fraction * total_steps))
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    decay_steps = total_steps - warmup_steps
    progress = min(1.0, (step + 1 - warmup_steps) / decay_steps) if decay_steps > 0 else 1.0
    return final_fraction + (1.0 - final_fraction) * 0.5 * (1.0 + math.cos(math.pi * progress))
