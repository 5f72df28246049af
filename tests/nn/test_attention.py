"""Shared key/value heads."""

from __future__ import annotations

import torch

from depthbench.nn.attention import Attention
from depthbench.nn.config import ModelConfig
from depthbench.nn.rotary import rotation_for
from tests.oracles.compare import assert_near


def test_a_shared_head_is_the_same_head_repeated_for_its_group_of_queries():
    shape = dict(n_layer=1, d_model=32, n_head=4, vocab_size=5)
    shared, full = (Attention(ModelConfig(**shape, n_kv_head=n_kv_head)).double() for n_kv_head in (2, 4))
    weights = shared.state_dict()
    for name in ("k_proj.weight", "v_proj.weight"):
        weights[name] = weights[name].unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    rotation = rotation_for(x, 8)
    assert_near(shared(x, None, rotation)[0], full(x, None, rotation)[0], 1e-14)
