"""Numbers that make no model are one line, not a traceback from inside torch."""

from __future__ import annotations

import pytest
import torch

from depthbench import build_model, solve_shape
from depthbench.errors import UserError

GOOD = dict(n_layer=2, d_model=24, n_head=4, vocab_size=11)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(n_layer=0), "n_layer is 0: give a whole number of at least 1"),
        (dict(n_layer=2.0), "n_layer is 2.0"),
        (dict(vocab_size=True), "vocab_size is True"),
        (dict(n_head=None), "n_head is None"),
        (dict(d_ff=-4), "d_ff is -4"),
        (dict(d_model=26), "d_model 26 does not split into 4 heads"),
        (dict(d_model=12), "heads 3 wide: rotary positions need an even width"),
        (dict(n_kv_head=3), "n_head 4 is no multiple of n_kv_head 3"),
        (dict(norm_eps=0), "norm_eps is 0"),
        (dict(norm_eps=float("nan")), "norm_eps is nan"),
        (dict(norm_eps="small"), "norm_eps is 'small'"),
    ],
)
def test_a_wrong_number_is_one_line(changes, says):
    with pytest.raises(UserError) as error:
        build_model("pre_ln", **GOOD | changes)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_defaults():
    config = build_model("pre_ln", **GOOD).config
    assert (config.n_kv_head, config.d_ff, config.head_dim, config.norm_eps, config.qk_norm) == (4, 64, 6, 1e-6, False)


def test_a_solved_shape_builds_a_model_of_its_own_count():
    shape = solve_shape("pico", ratio=16)
    with torch.device("meta"):
        model = build_model("pre_ln", **shape.model_kwargs())
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.params_total
    assert model.config.head_dim == shape.head_dim
