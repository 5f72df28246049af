"""DeepNorm is Post-LN with output projections divided by alpha, and starts with some matrices scaled by beta."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from depthbench import build_model
from depthbench.nn.layers import LayerNorm
from depthbench.residuals.base import SingleStream, Stream
from tests.oracles.compare import assert_near, gradients, randomise, some_tokens

SMALL = dict(n_layer=3, d_model=16, n_head=4, n_kv_head=2, vocab_size=13, d_ff=24, norm_eps=1e-24)


class PostLN(SingleStream):
    """LN(x + F(x)): the transformer of 2017, with DeepNorm's names."""

    def __init__(self, config):
        super().__init__(config)
        self.norms = nn.ModuleList(LayerNorm(config.d_model, config.norm_eps) for _ in range(config.n_sublayer))

    def build_sublayer(self, config, *, sublayer):
        built = super().build_sublayer(config, sublayer=sublayer)
        built.norm = None
        return built

    def write(self, state, carry, branch_out, emitted, *, sublayer):
        return Stream(self.norms[sublayer](state.x + branch_out))


def test_equals_post_ln_with_divided_output_projections():
    deepnorm, post_ln = (randomise(build_model(design, **SMALL).double()) for design in ("deepnorm", PostLN))
    post_ln.load_state_dict(deepnorm.state_dict())
    alpha = deepnorm.residual.alpha
    divided = [name for name, _ in post_ln.named_parameters() if "o_proj" in name or "down_proj" in name]
    with torch.no_grad():
        for name in divided:
            post_ln.get_parameter(name).div_(alpha)
    tokens = some_tokens(deepnorm)
    actual, expected = deepnorm(tokens), post_ln(tokens)
    assert_near(actual, expected, 1e-12)
    mine, theirs = (gradients(logits, dict(model.named_parameters())) for logits, model in ((actual, deepnorm), (expected, post_ln)))
    assert len(divided) == 6
    for name, gradient in mine.items():
        assert_near(gradient, theirs[name] / (alpha if name in divided else 1), 1e-12, name)


@pytest.mark.parametrize(("n_layer", "alpha", "beta"), [(6, 1.861, 0.380), (12, 2.213, 0.320), (24, 2.632, 0.269), (48, 3.130, 0.226)])
def test_constants(n_layer, alpha, beta):
    with torch.device("meta"):
        model = build_model("deepnorm", **SMALL | {"n_layer": n_layer})
    constants = model.residual
    assert constants.alpha == pytest.approx(alpha, abs=1e-3) and constants.beta == pytest.approx(beta, abs=1e-3)
    assert constants.beta**2 / constants.alpha**2 == pytest.approx(1 / (4 * n_layer))
    assert constants.alpha * constants.beta == pytest.approx(math.sqrt(0.5))


def test_the_five_matrices_start_smaller_by_beta_and_no_others():
    models = []
    for design in ("deepnorm", "pre_ln"):
        torch.manual_seed(0)
        models.append(build_model(design, **SMALL | {"init_std": 0.05}))
    deepnorm, plain = models
    scaled = set()
    for name, matrix in plain.named_parameters():
        if matrix.ndim == 2:
            factor = (deepnorm.get_parameter(name) / matrix).mean().item()
            kind = name.split(".")[-2]
            if factor == pytest.approx(deepnorm.residual.beta, rel=1e-4):
                scaled.add(kind)
            else:
                assert factor == 1 and kind in {"q_proj", "k_proj", "embedding", "head"}
    assert scaled == {"v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_sublayers_that_give_nothing_leave_the_normed_embedding():
    model = build_model("deepnorm", **SMALL).double()
    with torch.no_grad():
        for block in model.blocks:
            block.attention.core.o_proj.weight.zero_()
            block.feed_forward.core.down_proj.weight.zero_()
    state = model.embed(some_tokens(model))
    assert_near(model.run(state).x, F.layer_norm(state.x, (16,), eps=1e-24), 1e-12)
