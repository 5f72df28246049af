"""Rotary positions."""

from __future__ import annotations

import torch

from depthbench import build_model
from depthbench.nn.rotary import rotate, rotation_table
from tests.oracles import ops
from tests.oracles.compare import assert_near, some_tokens

CPU = torch.device("cpu")


def test_equals_a_complex_turn_of_each_pair():
    x = torch.randn(2, 9, 3, 8, dtype=torch.float64)
    turned = rotate(x, rotation_table(9, 8, CPU, torch.float64))
    for b, t, h in ((0, 0, 0), (1, 4, 2), (0, 8, 1)):
        assert_near(turned[b, t, h], ops.rotated(x[b, t, h], t), 1e-14)


def test_products_of_queries_and_keys_depend_on_their_distance_only():
    table = rotation_table(64, 16, CPU, torch.float64)
    q, k = (rotate(torch.randn(16, dtype=torch.float64).expand(1, 64, 1, 16), table)[0, :, 0] for _ in range(2))
    assert_near(q[10] @ k[3], q[60] @ k[53], 1e-12)
    assert (q[10] @ k[3] - q[10] @ k[4]).abs() > 1e-3


def test_low_precision_is_rotated_in_fp32():
    x = torch.randn(1, 9, 2, 8).bfloat16()
    table = rotation_table(9, 8, CPU, torch.float32)
    turned = rotate(x, table)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, rotate(x.float(), table).bfloat16())


def test_a_table_first_made_during_inference_serves_training():
    rotation_table.cache_clear()
    model = build_model("pre_ln", n_layer=1, d_model=8, n_head=2, vocab_size=5)
    tokens = some_tokens(model)
    with torch.inference_mode():
        model(tokens)
    model(tokens).sum().backward()
    assert model.embedding.weight.grad is not None
