"""What every design must do: the whole registry, and the two naive designs that prove the interface. There is no list of exemptions."""

from __future__ import annotations

import io
from contextlib import suppress

import pytest
import torch

from depthbench import build_model, residuals
from depthbench.errors import UserError
from depthbench.nn.config import ModelConfig
from depthbench.residuals.base import map_tensors
from tests.naive.full_attnres import NaiveFullAttnRes
from tests.naive.moda import NaiveMoDA
from tests.oracles.compare import assert_near, randomise, some_tokens

DESIGNS = [*residuals.names(), NaiveFullAttnRes, NaiveMoDA]
SHAPE = dict(n_layer=3, d_model=16, n_head=4, n_kv_head=2, vocab_size=29, d_ff=24)
LAYERS, SUBLAYERS = 3, 6

every_design = pytest.mark.parametrize("design", DESIGNS, ids=lambda design: design if isinstance(design, str) else design.__name__)


def fresh(design, **changes):
    return build_model(design, **SHAPE | changes)


def moved(design, **changes):
    """A model in fp64 with no parameter at its initial value."""
    return randomise(fresh(design, **changes).double())


def tensors_of(state):
    found = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, state)
    return found


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(tensors_of(left), tensors_of(right), strict=True))


# The function ---------------------------------------------------------------------------------------------------------------------


@every_design
def test_a_token_reaches_itself_and_later_ones_only(design):
    model = moved(design)
    tokens = some_tokens(model, length=7)
    other = tokens.clone()
    other[:, 3] = (other[:, 3] + 1) % SHAPE["vocab_size"]
    changed = (model(tokens) - model(other)).abs().amax(dim=(0, 2))
    assert changed[:3].max() <= 1e-12
    assert changed[3:].min() > 1e-6


@every_design
def test_every_parameter_gets_a_gradient(design):
    model = moved(design)
    model(some_tokens(model)).square().sum().backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.abs().max() > 0]
    assert without == []


@every_design
def test_every_parameter_is_part_of_the_graph_at_initialisation(design):
    """Some gradients may be zero at the first step, but none may be missing: data parallelism would wait for it forever."""
    model = fresh(design)
    model(some_tokens(model)).square().sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@every_design
def test_without_what_the_state_carries_the_output_changes(design):
    """Each block then starts from a state of zeros: nothing but the last block's outputs is left."""
    model = moved(design)
    tokens = some_tokens(model)
    state = model.embed(tokens)
    for block in range(LAYERS):
        state = model.run(map_tensors(torch.zeros_like, state), block, block + 1)
    assert (model.logits(state) - model(tokens)).abs().max() > 1e-3


@every_design
@pytest.mark.parametrize("changes", [dict(n_kv_head=4), dict(n_kv_head=1), dict(qk_norm=True)], ids=str)
def test_head_sharing_and_qk_norm_work(design, changes):
    model = moved(design, **changes)
    tokens = some_tokens(model)
    logits = model(tokens)
    logits.sum().backward()
    assert logits.shape == (2, 6, 29) and logits.isfinite().all()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())


@every_design
def test_bf16_autocast_stays_near_fp32(design):
    model = fresh(design)
    tokens = some_tokens(model)
    expected = model(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        actual = model(tokens)
        actual.float().sum().backward()
    assert actual.dtype == torch.bfloat16
    assert (actual - expected).abs().max() < 0.03 * expected.abs().max()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


# Construction ---------------------------------------------------------------------------------------------------------------------


@every_design
def test_a_checkpoint_restores_the_function(design):
    model, other = moved(design), fresh(design).double()
    saved = io.BytesIO()
    torch.save(model.state_dict(), saved)
    saved.seek(0)
    tokens = some_tokens(model)
    assert not torch.equal(model(tokens), other(tokens))
    other.load_state_dict(torch.load(saved))
    assert torch.equal(model(tokens), other(tokens))


@every_design
def test_a_model_built_on_the_meta_device_equals_the_direct_build(design):
    torch.manual_seed(3)
    direct = fresh(design)
    with torch.device("meta"):
        model = fresh(design)
    assert all(parameter.is_meta for parameter in model.parameters())
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.reset_parameters()
    assert_same_parameters(model, direct)
    assert torch.equal(model(some_tokens(model)), direct(some_tokens(model)))


@every_design
def test_what_is_shared_with_pre_ln_has_its_names_and_under_one_seed_its_values(design):
    """Up to a factor: a design may scale a matrix at initialisation."""
    torch.manual_seed(3)
    plain = fresh("pre_ln").state_dict()
    torch.manual_seed(3)
    model = fresh(design).state_dict()
    shared = [name for name in plain if name in model and model[name].shape == plain[name].shape]
    expected = {"embedding.weight", "head.weight", "blocks.0.attention.core.q_proj.weight", "blocks.2.feed_forward.core.up_proj.weight"}
    assert expected <= {*shared}
    for name in shared:
        assert_near(model[name] / model[name].norm(), plain[name] / plain[name].norm(), 1e-6, name)


@every_design
def test_extra_parameters_equal_their_formula(design):
    for changes in ({}, dict(n_layer=1), dict(n_layer=5, d_model=24, n_kv_head=4)):
        model, plain = fresh(design, **changes), fresh("pre_ln", **changes)
        assert model.params_extra == count(model) - count(plain)
        assert residuals.get(design).params_extra(ModelConfig(**SHAPE | changes)) == model.params_extra


@every_design
def test_parameter_groups_hold_every_parameter_once(design):
    model = fresh(design)
    decay, no_decay = model.parameter_groups(0.1)
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (0.1, 0.0)
    grouped = [id(parameter) for group in (decay, no_decay) for parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in model.parameters())
    decaying = {id(parameter) for parameter in decay["params"]}
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            assert id(parameter) not in decaying, name
        elif not name.startswith("residual."):
            assert id(parameter) in decaying, name


# The state ------------------------------------------------------------------------------------------------------------------------


@every_design
def test_a_run_from_any_boundary_equals_the_full_run(design):
    model = moved(design)
    tokens = some_tokens(model)
    expected = model(tokens)
    for block in range(LAYERS + 1):
        state = model.run(model.embed(tokens), 0, block)
        assert torch.equal(model.logits(model.run(state, block)), expected)
        assert torch.equal(model.logits(model.run(state, block)), expected)  # and once more from the same state


@every_design
def test_a_run_from_a_boundary_holds_after_later_blocks_have_changed_places(design):
    model = moved(design)
    tokens = some_tokens(model)
    prefix = model.run(model.embed(tokens), 0, 1)
    with model.swapped(1, 2):
        assert_near(model.logits(model.run(prefix, 1)), model(tokens), 1e-12)


@every_design
def test_a_run_outside_the_model_is_refused(design):
    model = fresh(design)
    state = model.embed(some_tokens(model))
    for start, stop in ((-1, 2), (2, 1), (0, LAYERS + 1)):
        with pytest.raises(ValueError, match="outside a model of 3"):
            model.run(state, start, stop)


@every_design
def test_states_are_never_changed(design):
    model = moved(design)
    seen = []

    def keep(name, sublayer, value):
        if name.startswith("state"):
            seen.append((value, map_tensors(torch.clone, value)))

    state = model.embed(some_tokens(model))
    keep("state", -1, state)
    with model.taps(keep):
        model.hidden(model.run(state))
        model.residual.skip(model.run(state, 0, 1), block=1)
    assert len(seen) == 1 + 2 * (SUBLAYERS + 2)
    assert all(same(value, copy) for value, copy in seen)


@every_design
def test_depth_states_and_readouts_exist_at_every_boundary(design):
    model = moved(design)
    state = model.embed(some_tokens(model))
    widths = set()
    for block in range(LAYERS + 1):
        depth_state = model.residual.depth_state(state, block=block)
        widths.add(depth_state.shape[-1])
        assert depth_state.shape[:2] == (2, 6)
        assert model.residual.readout(state, block=block).shape == (2, 6, 16)
        if block < LAYERS:
            state = model.run(state, block, block + 1)
    assert len(widths) == 1 and widths.pop() % 16 == 0
    assert_near(model.final_norm(model.residual.readout(state, block=LAYERS)), model.hidden(state), 1e-12)


@every_design
def test_hooks_on_boundary_states_give_the_gradient_on_the_depth_state(design):
    model = moved(design)
    boundaries, gradients = {}, {}

    def watch(name, sublayer, value):
        if name == "state_out" and sublayer % 2:
            boundaries[sublayer // 2 + 1] = value
            for tensor in tensors_of(value):
                tensor.register_hook(lambda gradient, tensor=tensor: gradients.__setitem__(id(tensor), gradient))

    with model.taps(watch):
        logits = model(some_tokens(model))
    logits.square().sum().backward()
    assert [*boundaries] == [1, 2, 3]
    for block, state in boundaries.items():
        of_gradients = map_tensors(lambda tensor: gradients.get(id(tensor), torch.zeros_like(tensor)), state)
        gradient = model.residual.depth_gradient(of_gradients, block=block)
        assert gradient.shape == model.residual.depth_state(state, block=block).shape
        assert gradient.isfinite().all() and gradient.abs().max() > 0


@every_design
def test_the_linear_form_composes_to_what_each_sublayer_reads(design):
    """sum_i W(i, l) f_i, from the coefficients alone, is the un-normalised input of sublayer l, and of the readout."""
    model = moved(design)
    records = {}
    with model.taps(lambda name, sublayer, value: records.setdefault(sublayer, {}).__setitem__(name, value)):
        last = model.run(model.embed(some_tokens(model)))
    residual = model.residual
    terms = [model.embedding(some_tokens(model))]
    slots = None  # (B, T, n, sources so far): how much of each source every slot holds
    for sublayer in range(SUBLAYERS + 1):
        at_readout = sublayer == SUBLAYERS
        state = last if at_readout else records[sublayer]["state_in"]
        branch_out = None if at_readout else records[sublayer]["branch_out"]
        form = residual.linear(state, sublayer=sublayer, branch_out=branch_out)
        if slots is None:
            slots = torch.ones(2, 6, form.read.shape[-1], 1, dtype=torch.float64)
        weights = torch.einsum("btn,btni->bti", form.read.expand(2, 6, -1), slots)
        read = torch.einsum("bti,ibtd->btd", weights, torch.stack(terms))
        expected = residual.readout(state, block=LAYERS) if at_readout else records[sublayer]["branch_in"]
        assert_near(read, expected, 1e-12, f"input of sublayer {sublayer}")
        if at_readout:
            assert form.mix is None and form.write is None
            break
        mixed = torch.einsum("btmn,btni->btmi", form.mix.expand(2, 6, -1, -1), slots)
        slots = torch.cat((mixed, form.write.expand(2, 6, -1).unsqueeze(-1)), -1)
        terms.append(branch_out)


# Taps, skip, swap -----------------------------------------------------------------------------------------------------------------


@every_design
def test_taps_see_every_sublayer_in_order_and_only_inside_the_with(design):
    model = fresh(design)
    tokens = some_tokens(model)
    calls, inner = [], []
    with model.taps(lambda *call: calls.append(call)):
        with suppress(RuntimeError), model.taps(lambda name, *_: inner.append(name)):
            model.run(model.embed(tokens), 0, 1)
            raise RuntimeError
        model(tokens)
    model(tokens)
    names = ["state_in", "branch_in", "branch_out", "state_out"]
    assert [(name, sublayer) for name, sublayer, _ in calls[8:]] == [(name, k) for k in range(SUBLAYERS) for name in names]
    assert inner == names * 2
    state_type = type(model.embed(tokens))
    for name, _, value in calls:
        assert type(value) is state_type if name.startswith("state") else value.shape == (2, 6, 16)
    for (_, _, before), (_, _, after) in zip(calls[11:-4:4], calls[12::4], strict=True):
        assert before is after  # a sublayer starts from the state that the one before it left


@every_design
def test_skipping_a_block_changes_what_follows_and_nothing_before(design):
    model = moved(design)
    tokens = some_tokens(model)
    expected = model(tokens)
    for block in range(LAYERS):
        states = [model.embed(tokens)]
        for b in range(block):
            states.append(model.run(states[-1], b, b + 1))
        copies = [map_tensors(torch.clone, state) for state in states]
        for rule in model.residual.skip_rules:
            skipped = model.residual.skip(states[-1], block=block, rule=rule)
            logits = model.logits(model.run(skipped, block + 1))
            assert logits.isfinite().all() and (logits - expected).abs().max() > 1e-3
        assert all(same(state, copy) for state, copy in zip(states, copies, strict=True))
        default = model.residual.skip(states[-1], block=block)
        assert same(default, model.residual.skip(states[-1], block=block, rule=model.residual.skip_rules[0]))
        with pytest.raises(UserError, match="unknown skip rule 'no such'"):
            model.residual.skip(states[-1], block=block, rule="no such")


@every_design
def test_swapping_twice_is_the_identity_and_an_error_inside_puts_the_blocks_back(design):
    model = moved(design)
    tokens = some_tokens(model)
    expected, parameters = model(tokens), {name: value.clone() for name, value in model.state_dict().items()}
    with suppress(RuntimeError), model.swapped(0, 2):
        assert (model(tokens) - expected).abs().max() > 1e-3
        raise RuntimeError
    assert all(torch.equal(value, parameters[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(tokens), expected)
    with model.swapped(1, 1):
        assert torch.equal(model(tokens), expected)


# Compilation: the designs that ship -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("design", residuals.names())
def test_compiled_by_region_equals_eager_and_keeps_the_names(design):
    eager, compiled = moved(design).float(), moved(design).float()
    compiled.load_state_dict(eager.state_dict())
    compiled.compile_regions(backend="aot_eager")
    eager.load_state_dict(compiled.state_dict())
    tokens = some_tokens(eager)
    assert_near(compiled(tokens), eager(tokens), 1e-5)


def assert_same_parameters(left, right):
    for (name, mine), (other, theirs) in zip(left.named_parameters(), right.named_parameters(), strict=True):
        assert name == other and torch.equal(mine, theirs), name


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())
