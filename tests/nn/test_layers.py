"""Initialisation and the norm."""

from __future__ import annotations

import pytest
import torch

from depthbench import build_model
from depthbench.nn.layers import Linear, RMSNorm
from tests.oracles import ops
from tests.oracles.compare import assert_near


def test_every_matrix_starts_as_a_truncated_normal_and_every_norm_at_one():
    model = build_model("pre_ln", n_layer=2, d_model=64, n_head=2, vocab_size=200, qk_norm=True)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert parameter.abs().max() <= 0.06, name
            assert parameter.std().item() == pytest.approx(0.0197, rel=0.05), name  # 0.02, less what the cut at 3 sigma takes
            assert abs(parameter.mean().item()) < 1e-3, name


def test_a_spread_of_its_own_is_kept_through_a_reset():
    layer = Linear(100, 100)
    layer.std = 0.001
    layer.reset_parameters()
    assert layer.weight.abs().max() <= 0.003
    assert layer.bias is None


def test_seed_and_names_decide_the_initial_values():
    def weights(seed, **changes):
        torch.manual_seed(seed)
        return build_model("pre_ln", **dict(n_layer=2, d_model=16, n_head=2, vocab_size=20) | changes).state_dict()

    first, again, other, deeper = weights(0), weights(0), weights(1), weights(0, n_layer=3)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])
    assert all(torch.equal(first[name], deeper[name]) for name in first)
    assert not torch.equal(first["blocks.0.attention.core.q_proj.weight"], first["blocks.1.attention.core.q_proj.weight"])


def test_initialising_a_model_moves_the_global_generator_by_one_draw():
    """Whatever is drawn next (data order, say) is the same for every design and shape."""
    torch.manual_seed(0)
    torch.randint(2**62, ())
    expected = torch.rand(3)
    torch.manual_seed(0)
    build_model("pre_ln", n_layer=2, d_model=8, n_head=2, vocab_size=5)
    assert torch.equal(torch.rand(3), expected)


def test_rms_norm_equals_its_formula_and_computes_in_the_weights_precision():
    norm = RMSNorm(12, eps=1e-3).double()
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 12, dtype=torch.float64) * 0.05
    expected = torch.stack([ops.norm(row, norm.weight, 1e-3) for row in x])
    assert_near(norm(x), expected, 1e-14)
    low = norm.float()(x.bfloat16())
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, norm(x.bfloat16().float()).bfloat16())
