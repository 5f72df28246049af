"""F: its two norms, and the cast under autocast."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from depthbench.nn.sublayer import Sublayer, to_compute_dtype


class Core(nn.Module):
    def forward(self, x, carry, rotation):
        return 10 * x + carry, (rotation,)


class Add(nn.Module):
    def __init__(self, amount):
        super().__init__()
        self.amount = amount

    def forward(self, x):
        return x + self.amount


@pytest.mark.parametrize(
    ("norm", "output_norm", "expected"),
    [(None, None, 15.0), (Add(1), None, 25.0), (None, Add(2), 17.0), (Add(1), Add(2), 27.0)],
)
def test_either_norm_may_be_missing_and_carry_and_emitted_pass_through(norm, output_norm, expected):
    branch_out, emitted = Sublayer(norm, Core(), output_norm)(torch.tensor([1.0]), 5.0, "rotation")
    assert branch_out.item() == expected
    assert emitted == ("rotation",)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_cast_under_autocast_happens_once_and_only_there(dtype):
    x = torch.randn(3)
    assert to_compute_dtype(x) is x
    with torch.autocast("cpu", dtype):
        assert to_compute_dtype(x).dtype == dtype
        assert to_compute_dtype(x.double()).dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert to_compute_dtype(x) is x
