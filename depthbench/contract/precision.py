"""bf16 autocast, as models are trained on a GPU."""

from __future__ import annotations

import torch

from depthbench.contract.subject import Subject, check, gradients, listed, move, require, some_tokens

DEEP = 48


@check
def bf16_stays_near_fp32(subject: Subject) -> None:
    """Under bf16 autocast logits and gradients of 48 blocks are finite and near those in fp32: rounding must not grow with depth faster
    than the signal. Parameters keep gradients in fp32; coefficients that mix streams or sources belong into fp32 too."""
    model, tokens = move(subject.fresh(n_layer=DEEP), 0.01), some_tokens()
    expected = model(tokens)
    expected_gradients = gradients(model, expected)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
    found = gradients(model, logits)
    require(logits.dtype == torch.bfloat16, f"logits are {logits.dtype} under autocast, not bfloat16: the head saw no autocast")
    require(logits.isfinite().all(), "logits are not finite")
    strange = [name for name, gradient in found.items() if not gradient.isfinite().all()]
    require(not strange, f"gradients that are not finite: {listed(strange)}")
    strange = [name for name, gradient in found.items() if gradient.dtype != torch.float32]
    require(not strange, f"gradients that are not fp32: {listed(strange)}")
    off = ((logits.float() - expected).norm() / expected.norm()).item()
    require(off < 0.05, f"logits are off by {off:.1%} of their norm from those in fp32")
    mine, theirs = (torch.cat([gradient.flatten() for gradient in of.values()]) for of in (found, expected_gradients))
    off = ((mine - theirs).norm() / theirs.norm()).item()
    require(off < 0.1, f"the gradient is off by {off:.1%} of its norm from the one in fp32")
