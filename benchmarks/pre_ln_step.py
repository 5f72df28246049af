"""Tokens per second of our eager Pre-LN training step against Hugging Face's LlamaForCausalLM of the same shape.

    python benchmarks/pre_ln_step.py [--size nano] [--steps 40] [--device cpu]

A step is forward, cross-entropy over the logits, backward, without an optimizer. Both models live in one process and take turns,
step by step and in changing order, so that whatever else the machine does hits both; medians are compared. Prints one line per
size; the ratio is ours to theirs, above 1 when ours is faster. Needs `pip install depthbench[benchmark]`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from depthbench import build_model
from depthbench.nn.config import ModelConfig
from depthbench.shapes import size_named, solve_shape

WARMUP = 3


@dataclass(frozen=True)
class Case:
    config: ModelConfig
    batch: int
    length: int


def of_size(name: str) -> Case:
    """A size's default shape, micro-batch and sequence length, as `depthbench fit --size NAME` trains it."""
    size = size_named(name)
    return Case(ModelConfig(**solve_shape(size).model_kwargs()), batch=size.micro_batch, length=size.seq_len)


CASES = {
    "nano": of_size("nano"),
    "micro": of_size("micro"),
    "16x256": Case(ModelConfig(n_layer=16, d_model=256, n_head=4, vocab_size=2048), batch=4, length=256),
    "16x256-gqa": Case(ModelConfig(n_layer=16, d_model=256, n_head=4, n_kv_head=2, vocab_size=2048), batch=4, length=256),
}


def ours(config: ModelConfig) -> nn.Module:
    return build_model(
        "pre_ln",
        n_layer=config.n_layer,
        d_model=config.d_model,
        n_head=config.n_head,
        n_kv_head=config.n_kv_head,
        d_ff=config.d_ff,
        vocab_size=config.vocab_size,
    )


def theirs(config: ModelConfig, length: int) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=config.n_layer,
            hidden_size=config.d_model,
            num_attention_heads=config.n_head,
            num_key_value_heads=config.n_kv_head,
            intermediate_size=config.d_ff,
            vocab_size=config.vocab_size,
            max_position_embeddings=length,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )


def seconds_of_step(logits_of: Callable[[Tensor], Tensor], model: nn.Module, block: Tensor) -> float:
    """One step on a block of tokens (B, T + 1), with a wait for the device before and after."""
    model.zero_grad(set_to_none=True)
    wait = torch.cuda.synchronize if block.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    logits = logits_of(block[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), block[:, 1:].flatten()).backward()
    wait()
    return time.perf_counter() - start


def compare(case: Case, steps: int, device: str) -> tuple[float, float]:
    """Median seconds per step, ours and theirs."""
    torch.manual_seed(0)
    config = case.config
    our, their = ours(config).to(device), theirs(config, case.length).to(device)
    count, reference = (sum(p.numel() for p in model.parameters()) for model in (our, their))
    if count != reference:
        raise SystemExit(f"not the same shape: {count:,} parameters against {reference:,}")
    runs = [(our, our, []), (their, lambda tokens: their(input_ids=tokens).logits, [])]
    for step in range(WARMUP + steps):
        block = torch.randint(config.vocab_size, (case.batch, case.length + 1), device=device)
        for model, logits_of, seconds in runs if step % 2 else reversed(runs):
            seconds.append(seconds_of_step(logits_of, model, block))
    return tuple(statistics.median(seconds[WARMUP:]) for _, _, seconds in runs)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=CASES, action="append", help="which shapes (default: all)")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(arguments)
    for name in args.size or CASES:
        case = CASES[name]
        our, their = compare(case, args.steps, args.device)
        tokens = case.batch * case.length
        shape = f"{case.config.n_layer} x {case.config.d_model}"
        print(f"{name:12s} {shape:9s} ours {tokens / our:9,.0f} tokens/s   Llama {tokens / their:9,.0f} tokens/s   ratio {their / our:.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
