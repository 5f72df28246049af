"""What the base classes do for every design."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from depthbench import build_model
from depthbench.errors import UserError
from depthbench.nn.feed_forward import SwiGLU
from depthbench.residuals.base import Stream, map_tensors
from depthbench.residuals.pre_ln import PreLN

TINY = dict(n_layer=2, d_model=8, n_head=2, vocab_size=7)


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
    residual = build_model("pre_ln", **TINY).residual
    state = Stream(torch.zeros(1, 2, 8))
    assert residual.skip(state, block=0, rule="identity") is state
    with pytest.raises(UserError, match="unknown skip rule 'zero'.*known: identity"):
        residual.skip(state, block=0, rule="zero")


class WithTable(PreLN):
    """Owns a matrix that must not decay, a table of vectors, and a matrix."""

    def __init__(self, config):
        super().__init__(config)
        self.static = nn.Parameter(torch.empty(4, 5))
        self.vectors = nn.Parameter(torch.empty(4, 5))
        self.dynamic = nn.Parameter(torch.empty(4, 5))

    def no_decay_parameters(self):
        return [self.static]

    def tables_of_vectors(self):
        return [self.vectors]


def test_a_matrix_that_the_design_exempts_never_decays_and_a_table_of_vectors_where_vectors_do():
    model = build_model(WithTable, **TINY)
    own = model.residual
    for decay_vectors, expected in ((False, {own.dynamic}), (True, {own.dynamic, own.vectors})):
        decaying, rest = ({*group["params"]} for group in model.parameter_groups(0.1, decay_vectors=decay_vectors))
        assert {*own.parameters()} & decaying == expected
        assert {*model.parameters()} == decaying | rest and not decaying & rest


class WiderAtTheTop(PreLN):
    def build_sublayer(self, config, *, sublayer):
        plain = super().build_sublayer(config, sublayer=sublayer)
        if sublayer == 3:
            plain.core = SwiGLU(replace(config, d_ff=2 * config.d_ff))
        return plain


def test_a_swap_leaves_parameters_of_another_shape_in_place():
    model = build_model(WiderAtTheTop, **TINY)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with model.swapped(0, 1):
        after = model.state_dict()
        for kind in ("attention.core.q_proj", "feed_forward.core.up_proj"):
            moved = torch.equal(after[f"blocks.0.{kind}.weight"], before[f"blocks.1.{kind}.weight"])
            assert moved is kind.startswith("attention")
