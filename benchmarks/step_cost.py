"""What a design's training step costs, in time and in memory, as a ratio to Pre-LN's at the same shape.

    python benchmarks/step_cost.py [--arch hc] [--layers 32] [--steps 15] [--naive] [--device cuda --precision bf16 --compile]

A step is forward, cross-entropy over the logits, backward, without an optimizer, on 4 x 256 tokens. The shapes hold the
parameters of the blocks constant: 8 x 256, 32 x 128, 70 x 88. Design and Pre-LN live in one process and take turns step by step, in
changing order, so that whatever else the machine does hits both; medians are compared. ``--naive`` puts the straightforward form of
tests/naive beside it. Peak memory is what one step allocates above weights and gradients, counted by the allocator (CPU:
torch.profiler's memory events).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthbench import build_model, residuals
from depthbench.residuals.base import Residual

SHAPES = {8: 256, 32: 128, 70: 88}  # n_layer: d_model
COMMON = dict(n_head=4, vocab_size=2048)
BATCH, LENGTH = 4, 256
WARMUP = 3


def naive_form(name: str) -> type[Residual] | None:
    """The straightforward form of a design, where tests/naive has one."""
    root = Path(__file__).resolve().parent.parent
    if not (root / "tests" / "naive" / f"{name}.py").exists():
        return None
    sys.path.insert(0, str(root))
    module = import_module(f"tests.naive.{name}")
    return module.NAIVE


def model_of(arch: str | type[Residual], n_layer: int, args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    model = build_model(arch, n_layer=n_layer, d_model=SHAPES[n_layer], **COMMON).to(args.device)
    if args.compile:
        model.compile_regions()
    return model


def step(model: nn.Module, block: Tensor, precision: str) -> None:
    """Forward and backward on tokens (B, T + 1)."""
    mixed = torch.autocast(block.device.type, torch.bfloat16) if precision == "bf16" else nullcontext()
    with mixed:
        logits = model(block[:, :-1])
    F.cross_entropy(logits.float().flatten(0, 1), block[:, 1:].flatten()).backward()


def seconds_of_step(model: nn.Module, block: Tensor, precision: str) -> float:
    model.zero_grad(set_to_none=True)
    wait = torch.cuda.synchronize if block.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    step(model, block, precision)
    wait()
    return time.perf_counter() - start


def medians(models: list[nn.Module], args: argparse.Namespace) -> list[float]:
    """Median seconds per step of each model; they take turns."""
    block = torch.randint(COMMON["vocab_size"], (BATCH, LENGTH + 1), device=args.device)
    seconds: list[list[float]] = [[] for _ in models]
    for turn in range(WARMUP + args.steps):
        for index in range(len(models)) if turn % 2 else reversed(range(len(models))):
            seconds[index].append(seconds_of_step(models[index], block, args.precision))
    return [statistics.median(of_model[WARMUP:]) for of_model in seconds]


def peak_bytes(model: nn.Module, args: argparse.Namespace) -> int:
    """The most that one step allocates at a time, above weights and gradients."""
    block = torch.randint(COMMON["vocab_size"], (BATCH, LENGTH + 1), device=args.device)
    step(model, block, args.precision)  # gradients are there from now on
    if block.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(model, block, args.precision)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step(model, block, args.precision)
    changes = [(event.start_ns(), event.nbytes()) for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for _, change in sorted(changes, key=lambda change: change[0]):
        held += change
        peak = max(peak, held)
    return peak


def report(arch: str, n_layer: int, args: argparse.Namespace) -> str:
    """One line of the table: this design against Pre-LN, and its naive form against Pre-LN where asked."""
    forms = {"pre_ln": "pre_ln", arch: arch}
    if args.naive and (naive := naive_form(arch)):
        forms["naive"] = naive
    models = [model_of(form, n_layer, args) for form in forms.values()]
    seconds, peaks = medians(models, args), [peak_bytes(model, args) for model in models]
    line = f"{arch:14s} {n_layer:3d} x {SHAPES[n_layer]:<4d} {1e3 * seconds[0]:8.1f} ms {1e3 * seconds[1]:8.1f} ms"
    line += f"  time x {seconds[1] / seconds[0]:5.2f}  memory x {peaks[1] / peaks[0]:5.2f}"
    if len(models) > 2:
        line += f"   naive: time x {seconds[2] / seconds[0]:5.2f}  memory x {peaks[2] / peaks[0]:5.2f}"
    return line


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", action="append", help="a design (default: all but pre_ln)")
    parser.add_argument("--layers", type=int, choices=SHAPES, action="append", help="depths (default: all three)")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--naive", action="store_true", help="also the straightforward form of tests/naive")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args(arguments)
    print(f"torch {torch.__version__}, {args.device}, {torch.get_num_threads()} threads, {args.precision}, compile {args.compile}")
    print(f"{'design':14s} shape       pre_ln      design     ratios to pre_ln")
    for arch in args.arch or residuals.names()[1:]:
        for n_layer in args.layers or SHAPES:
            print(report(arch, n_layer, args), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
