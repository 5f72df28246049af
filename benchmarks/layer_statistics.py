"""What recording layer statistics costs: a training step with taps attached against one without, alternating in one process.

    python benchmarks/layer_statistics.py [--size nano] [--ratio 32] [--steps 60] [--every 10]

Prints the two medians and the share of training time that recording every N steps costs: (sampled - plain) / (N x plain). The rows
are made and handed to a real RunWriter, as in a run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from depthbench import build_model, solve_shape
from depthbench.shapes import size_named
from depthbench.store.writer import RunWriter
from depthbench.training.layer_stats import LayerStatistics
from depthbench.training.module import next_token_loss


def trainer_at(step: int) -> SimpleNamespace:
    """As much of a Trainer as the callback looks at."""
    strategy = SimpleNamespace(reduce=lambda tensor, reduce_op: tensor, root_device=torch.device("cpu"))
    fit_loop = SimpleNamespace(_should_accumulate=lambda: False)
    return SimpleNamespace(global_step=step, world_size=1, is_global_zero=True, strategy=strategy, fit_loop=fit_loop)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="nano")
    parser.add_argument("--ratio", type=float, default=32)
    parser.add_argument("--steps", type=int, default=60, help="steps of each kind")
    parser.add_argument("--every", type=int, default=10, help="recorded every so many steps")
    args = parser.parse_args()
    size, shape = size_named(args.size), solve_shape(args.size, args.ratio)
    torch.manual_seed(0)
    model = build_model("pre_ln", **shape.model_kwargs())
    optimizer = torch.optim.AdamW(model.parameter_groups(0.1), lr=1e-3)
    blocks = torch.randint(0, shape.vocab_size, (size.micro_batch, size.seq_len + 1))
    module = SimpleNamespace(model=model)
    times: dict[bool, list[float]] = {False: [], True: []}

    with tempfile.TemporaryDirectory() as folder, RunWriter(Path(folder) / "run", {"run_id": "benchmark"}) as writer:
        callback = LayerStatistics(writer.add, every_n_steps=2, tokens_per_step=blocks[:, 1:].numel(), last_step=-1)
        for step in range(2 * args.steps + 6):
            began = time.perf_counter()
            callback.on_train_batch_start(trainer_at(step), module, blocks, step)
            optimizer.zero_grad()
            next_token_loss(model, blocks).backward()
            optimizer.step()
            callback.on_train_batch_end(trainer_at(step + 1), module, None, blocks, step)
            if step >= 6:  # the first steps warm caches up
                times[callback.sampled(step + 1)].append(time.perf_counter() - began)
        writer.seal("finished")

    plain, sampled = (statistics.median(times[kind]) for kind in (False, True))
    share = 100 * (sampled - plain) / (args.every * plain)
    tokens, threads = blocks[:, 1:].numel(), torch.get_num_threads()
    print(f"{args.size}: {shape.n_layer} layers x {shape.d_model}, {tokens} tokens a step, {threads} threads")
    print(f"plain step {1e3 * plain:.1f} ms, sampled step {1e3 * sampled:.1f} ms (medians of {args.steps} alternating steps)")
    print(f"recording every {args.every} steps costs {share:.2f} % of training time (target: under 2 %)")


if __name__ == "__main__":
    main()
