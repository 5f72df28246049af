"""The documented FLOP formulas against torch's FlopCounterMode, and by hand for two layers."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from depthbench import build_model
from depthbench.shapes import Shape, flops_per_token_train, prefill_flops

T = 8
SHAPE = Shape(n_layer=2, d_model=16, n_head=2, n_kv_head=1, head_dim=8, d_ff=48, vocab_size=40)
MATRICES = 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 48)  # q, o; k, v; gate, up, down


def counted(model, blocks, backward):
    """FLOPs of the matrices, and of attention's two products, as torch counts them; masked positions are not left out."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = model(blocks)
        if backward:
            logits.sum().backward()
    by_op = counter.get_flop_counts()["Global"]
    attention = sum(flops for op, flops in by_op.items() if "bmm" in str(op))
    return sum(by_op.values()) - attention, attention


@pytest.fixture
def model():
    return build_model("pre_ln", **SHAPE.model_kwargs())


def test_by_hand():
    assert SHAPE.params_matrices == MATRICES
    assert prefill_flops(SHAPE, T) == 2 * T * MATRICES + 2 * 2 * T * (T + 1) * 16
    assert flops_per_token_train(SHAPE, T) == 6 * (MATRICES + 40 * 16) + 6 * 2 * (T + 1) * 16


def test_prefill_against_torch(model):
    matrices, attention = counted(model, torch.zeros(1, T, dtype=torch.long), backward=False)
    assert matrices == 2 * T * (MATRICES + 40 * 16)  # torch reads the head at every position too
    assert attention == (prefill_flops(SHAPE, T) - 2 * T * MATRICES) * 2 * T / (T + 1)


def test_training_against_torch(model):
    matrices, attention = counted(model, torch.zeros(1, T, dtype=torch.long), backward=True)
    assert matrices == 6 * T * (MATRICES + 40 * 16)
    assert matrices + attention * (T + 1) / (2 * T) == T * flops_per_token_train(SHAPE, T)
