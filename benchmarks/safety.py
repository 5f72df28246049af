"""What it costs to lose nothing: the look for non-finite values at each step, the checksum of a checkpoint, and the loader's watchdog.

    python benchmarks/safety.py [--steps 30] [--megabytes 500] [--device cuda]

A step is the nano base shape's, 4 x 256 tokens, with AdamW; the form with the look and the one without take turns in one process, and
medians are compared. A checkpoint is written whole (synced, renamed) with and without its checksum, and read for damage. Batches of
4 x 257 token ids in memory come through the loader that waits no longer than asked, and through PyTorch's own.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import DataLoader

from depthbench import build_model, recipes, shapes
from depthbench.store.disk import replacing
from depthbench.training import checkpoints
from depthbench.training.data import BlockLoader
from depthbench.training.module import LanguageModelingModule

WARMUP = 3


def medians(forms: list[Callable[[], None]], repeats: int, wait: Callable[[], None] = lambda: None) -> list[float]:
    """Median seconds of each form; they take turns, in changing order."""
    seconds: list[list[float]] = [[] for _ in forms]
    for turn in range(WARMUP + repeats):
        for index in range(len(forms)) if turn % 2 else reversed(range(len(forms))):
            wait()
            start = time.perf_counter()
            forms[index]()
            wait()
            seconds[index].append(time.perf_counter() - start)
    return [statistics.median(of_form[WARMUP:]) for of_form in seconds]


def finite_look(args: argparse.Namespace) -> None:
    size = shapes.size_named("nano")
    shape = size.shape(*size.base)
    torch.manual_seed(0)
    model = build_model("pre_ln", **shape.model_kwargs()).to(args.device)
    module = LanguageModelingModule(model, recipe=recipes.recipe("paper"), lr=1e-3, total_steps=10**6)
    module._trainer = SimpleNamespace(world_size=1, global_step=0)
    optimizer = module.configure_optimizers()["optimizer"]
    block = torch.randint(shape.vocab_size, (4, 257), device=args.device)

    def step(clip: Callable[[], None]) -> None:
        optimizer.zero_grad()
        module.training_step(block).backward()
        clip()
        optimizer.step()

    def without() -> None:
        module._micro_batches.clear()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)

    looking, plain = medians(
        [lambda: step(lambda: module.configure_gradient_clipping(optimizer, 1.0)), lambda: step(without)],
        args.steps,
        torch.cuda.synchronize if args.device == "cuda" else lambda: None,
    )
    print(f"step with the look for non-finite values {1e3 * looking:.2f} ms, without {1e3 * plain:.2f} ms: {looking / plain:.3f}")


def checksum(args: argparse.Namespace) -> None:
    stored = {f"weight.{number}": torch.randn(2_500_000) for number in range(args.megabytes // 10)}
    with tempfile.TemporaryDirectory() as folder:
        with_it, plain = Path(folder) / "with.ckpt", Path(folder) / "plain.ckpt"

        def save_plain() -> None:
            with replacing(plain) as temporary, open(temporary, "wb") as file:
                torch.save(stored, file)

        forms = [lambda: checkpoints.CheckpointFiles().save_checkpoint(stored, with_it), save_plain]
        ours, without = medians(forms, 5)
        whole, load = medians([lambda: checkpoints.is_whole(with_it), lambda: torch.load(with_it, weights_only=True)], 5)
    print(f"checkpoint of {args.megabytes} MB: saved in {ours:.2f} s, without its checksum {without:.2f} s: {ours / without:.3f}")
    print(f"read for damage in {whole:.2f} s, loaded in {load:.2f} s")


def watchdog() -> None:
    blocks, batches = [*torch.randint(2048, (4000, 257))], 1000
    forms = [
        lambda: list(BlockLoader(blocks, batch_size=4, timeout_s=300)),
        lambda: list(DataLoader(blocks, batch_size=4)),
    ]
    ours, plain = (1e6 * seconds / batches for seconds in medians(forms, 11))
    print(f"a batch through the loader with a watchdog {ours:.0f} us, through PyTorch's {plain:.0f} us: {ours - plain:.0f} us more")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    finite_look(arguments)
    checksum(arguments)
    watchdog()
