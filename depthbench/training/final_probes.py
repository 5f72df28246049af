"""The layer probes that a run ends with: the cheap ones at the small sizes, so that a first run shows what its layers do."""

from __future__ import annotations

import time
from pathlib import Path

from depthbench.nn.model import LanguageModel
from depthbench.probes import runner
from depthbench.probes.windows import windows
from depthbench.store.reader import Store
from depthbench.store.writer import RunWriter
from depthbench.training.data import CorpusDataModule
from depthbench.training.interruption import Interrupted, stopped_at_once
from depthbench.training.plan import Plan

# At most so many windows, one for so many training tokens: at pico and nano the cheap probes then take at most about 5 % of a run's time.
WINDOWS, TOKENS_PER_WINDOW = 16, 64_000


def measure(plan: Plan, folder: Path, model: LanguageModel, data: CorpusDataModule) -> int:
    """Run the probes that the plan asks for on the finished run of ``folder``; returns the exit code: 0, or a signal's.

    The run is sealed as finished before: whatever ends this, nothing of the training is lost, and ``depthbench probe`` adds what is
    missing. The time it took is the scalar ``perf/probes_s``.
    """
    if not plan.probes:
        return 0
    began = time.perf_counter()
    at = {"step": plan.last_step, "tokens": plan.last_step * plan.batch_tokens}
    trained_s = Store(folder.parent).scalars([folder.name], ["val/loss"])["wall_s"].max()
    tokens = windows(data.val_dataset(), min(WINDOWS, max(1, at["tokens"] // TOKENS_PER_WINDOW)))
    subject = runner.Subject(folder, model, tokens, step=at["step"], tokens_seen=at["tokens"])
    try:
        with RunWriter(folder) as writer, stopped_at_once():
            runner.measure(writer, subject, runner.measurements(model, plan.probes))
            seconds = time.perf_counter() - began
            writer.add("scalars", [{**at, "wall_s": trained_s, "name": "perf/probes_s", "value": seconds}])
    except Interrupted as stop:
        print(f"\nInterrupted. The run is finished; `depthbench probe {folder.name}` measures what is missing.", flush=True)
        return stop.exit_code
    print(f"probes: {', '.join(plan.probes)} ({len(tokens)} x {tokens.shape[1] - 1} held-out tokens, {seconds:.1f} s)", flush=True)
    return 0
