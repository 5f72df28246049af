"""What the base classes do for every design."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from depthbench import build_model
from depthbench.errors import UserError
from depthbench.residuals.base import Stream, map_tensors


class Nested(NamedTuple):
    x: Tensor
    writes: tuple[Tensor, ...]
    flag: bool = True


def test_map_tensors_reaches_every_tensor_and_keeps_type_and_constants():
    state = Nested(torch.ones(2), (torch.ones(1), torch.zeros(3)))
    doubled = map_tensors(lambda tensor: 2 * tensor, state)
    assert type(doubled) is Nested and doubled.flag is True
    assert doubled.x.tolist() == [2, 2] and [write.tolist() for write in doubled.writes] == [[2], [0, 0, 0]]
    assert state.x.tolist() == [1, 1]


def test_an_unknown_skip_rule_names_the_known_ones():
    residual = build_model("pre_ln", n_layer=1, d_model=8, n_head=2, vocab_size=7).residual
    state = Stream(torch.zeros(1, 2, 8))
    assert residual.skip(state, block=0, rule="identity") is state
    with pytest.raises(UserError, match="unknown skip rule 'zero'.*known: identity"):
        residual.skip(state, block=0, rule="zero")
