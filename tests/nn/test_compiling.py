"""torch.compile by region: few graphs whatever the depth, no silent fallback, the same names."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters

from depthbench import build_model
from depthbench.residuals.base import Stream
from depthbench.residuals.pre_ln import PreLN
from tests.oracles.compare import assert_near, gradients, randomise, some_tokens

DEEP = dict(n_layer=24, d_model=32, n_head=2, vocab_size=50)


class Gated(PreLN):
    """A design with a parameter per sublayer and a compiled write, as a mixing design has: the index stays outside the region."""

    def __init__(self, config):
        super().__init__(config)
        self.gates = nn.Parameter(torch.empty(config.n_sublayer, config.d_model))
        self.add = add

    def reset_parameters(self):
        nn.init.ones_(self.gates)

    def no_decay_parameters(self):
        return [self.gates]

    def write(self, state, carry, branch_out, emitted, *, sublayer):
        return Stream(self.add(state.x, branch_out, self.gates[sublayer]))

    def compile_regions(self, compile_region):
        self.add = compile_region(add)


def add(x, branch_out, gate):
    return x + gate * branch_out


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def train_and_validate(model):
    tokens = some_tokens(model)
    logits = model(tokens)
    values = gradients(logits, dict(model.named_parameters()))
    model.eval()
    with torch.no_grad():
        model(tokens)
    model.train()
    return logits, values


@pytest.mark.parametrize(("design", "most"), [("pre_ln", 4), (Gated, 6)])
def test_24_layers_take_two_graphs_per_kind_of_region_and_agree_with_eager(design, most):
    """One graph for training and one for validation, of attention, of feed-forward and of what a design adds."""
    model = randomise(build_model(design, **DEEP), spread=0.02)
    expected, expected_gradients = train_and_validate(model)
    model.compile_regions(backend="aot_eager")
    counters.clear()
    logits, values = train_and_validate(model)
    assert graphs() == most
    assert not counters["graph_break"]
    assert_near(logits, expected, 1e-5)
    for name, value in values.items():
        assert_near(value, expected_gradients[name], 1e-4, name)


def test_a_constant_per_depth_in_carry_costs_no_graph_per_depth():
    class Scaled(PreLN):
        def build_sublayer(self, config, *, sublayer):
            plain = super().build_sublayer(config, sublayer=sublayer)
            plain.core = ScaledInput(plain.core)
            return plain

        def read(self, state, *, sublayer):
            return state.x, (sublayer // 2 + 1) ** -0.5

    class ScaledInput(nn.Module):
        def __init__(self, core):
            super().__init__()
            self.core = core

        def forward(self, x, carry, rotation):
            return self.core(x * carry, None, rotation)

    model = build_model(Scaled, **DEEP)
    model.compile_regions(backend="aot_eager")
    counters.clear()
    model(some_tokens(model)).sum().backward()
    assert graphs() <= 4


def test_more_recompilations_than_allowed_are_an_error():
    model = build_model("pre_ln", **DEEP | {"n_layer": 1})
    tokens = some_tokens(model)
    model.compile_regions(backend="eager")
    with torch._dynamo.config.patch(recompile_limit=1):
        model(tokens)
        with pytest.raises(FailOnRecompileLimitHit):
            model.double()(tokens)


def test_a_graph_break_is_an_error():
    class Breaking(PreLN):
        def build_sublayer(self, config, *, sublayer):
            plain = super().build_sublayer(config, sublayer=sublayer)
            plain.norm.register_forward_hook(lambda *_: torch._dynamo.graph_break())
            return plain

    model = build_model(Breaking, **DEEP | {"n_layer": 1})
    model.compile_regions(backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        model(some_tokens(model))


def test_another_model_in_the_process_is_compiled_for_its_own_sizes():
    sizes = []

    def backend(graph, examples):
        sizes.extend(size for example in examples for size in example.shape)
        return graph

    for d_model, length in ((16, 5), (32, 11), (48, 13)):
        model = build_model("pre_ln", n_layer=2, d_model=d_model, n_head=2, vocab_size=9)
        model.compile_regions(backend=backend)
        model(some_tokens(model, length=length))
    assert {16, 32, 48, 5, 11, 13} < {*sizes}
    assert all(type(size) is int for size in sizes)  # a size that dynamo had turned into a symbol would be a SymInt


def test_compiled_and_eager_load_each_others_weights_and_taps_still_fire():
    eager, compiled = (randomise(build_model("pre_ln", **DEEP | {"n_layer": 2}), seed) for seed in (0, 1))
    compiled.compile_regions(backend="aot_eager")
    assert [*compiled.state_dict()] == [*eager.state_dict()]
    compiled.load_state_dict(eager.state_dict())
    eager.load_state_dict(compiled.state_dict())
    tokens, seen = some_tokens(eager), []
    with compiled.taps(lambda name, sublayer, value: seen.append((name, sublayer))):
        assert_near(compiled(tokens), eager(tokens), 1e-5)
    assert len(seen) == 4 * 4
    assert_near(copy.deepcopy(compiled)(tokens), eager(tokens), 1e-5)


@pytest.mark.slow
def test_the_eager_twin_shares_the_weights_and_leaves_what_is_frozen_frozen():
    model = randomise(build_model("keel", **DEEP | {"n_layer": 2}))
    assert model.eager() is model
    model.embedding.requires_grad_(False)
    model.residual.requires_grad_(False)
    frozen = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    model.compile_regions(backend="aot_eager")
    twin = model.eager()
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == frozen
    assert all(mine is its for mine, its in zip(model.parameters(), twin.parameters(), strict=True))
    assert_near(twin(some_tokens(model)), model(some_tokens(model)), 1e-5)


def test_inductor_agrees_with_eager():
    model = randomise(build_model("pre_ln", **DEEP), spread=0.02)
    expected, expected_gradients = train_and_validate(model)
    model.compile_regions()
    counters.clear()
    logits, values = train_and_validate(model)
    assert graphs() <= 4
    assert_near(logits, expected, 1e-4)
    for name, value in values.items():
        assert_near(value, expected_gradients[name], 1e-3, name)
