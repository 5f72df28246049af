"""Mixture-of-Depths Attention: the naive form against the oracle, the fast form against the naive one, and what must be true of both."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch._dynamo.utils import counters
from torch.autograd import gradcheck
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from depthbench import build_model
from depthbench.nn.rotary import rotation_for
from depthbench.residuals import _fused_attention
from depthbench.residuals._depth_attention import PAGE, Memory
from depthbench.residuals._fused_attention import CPU, EFFICIENT, FLASH, PLAIN
from depthbench.residuals.moda import MoDA
from depthbench.shapes import Shape
from tests.naive.moda import NaiveMoDA
from tests.oracles import moda
from tests.oracles.compare import assert_equals_oracle, assert_near, gradients, randomise, some_tokens

SMALL = dict(n_layer=3, d_model=16, n_head=4, n_kv_head=2, vocab_size=13, d_ff=24)
forms = pytest.mark.parametrize("form", ["moda", NaiveMoDA], ids=["fast", "naive"])


def model_of(form="moda", **changes):
    return randomise(build_model(form, **SMALL | changes).double())


def pair_of(**changes):
    """The fast form and the naive one, with the same weights."""
    fast, naive = model_of(**changes), model_of(NaiveMoDA, **changes)
    naive.load_state_dict(fast.state_dict())
    return fast, naive


def assert_same_step(fast, naive, tokens, tolerance=1e-12):
    logits, expected = fast(tokens), naive(tokens)
    assert_near(logits, expected, tolerance)
    mine, theirs = (gradients(out, dict(model.named_parameters())) for out, model in ((logits, fast), (expected, naive)))
    for name, gradient in theirs.items():
        assert gradient.abs().max() > 0 or tokens.shape[1] == 1, name  # a single token's key of its own moves no share but depth's
        assert_near(mine[name], gradient, tolerance, f"gradient of {name}")


# The function ---------------------------------------------------------------------------------------------------------------------


@forms
@pytest.mark.parametrize("changes", [dict(qk_norm=True), dict(qk_norm=True, rotate_depth_keys=True)], ids=str)
def test_equals_the_oracle_with_all_gradients(form, changes):
    options = {"rotate_depth_keys": changes.get("rotate_depth_keys", False)}
    assert_equals_oracle(model_of(form, **changes), lambda *given: moda.logits(*given, **options), 1e-10, some_tokens(model_of(), 1, 5))


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(("d_model", "n_kv_head"), [(16, 4), (24, 2), (40, 1)])
def test_the_fast_form_equals_the_naive_one_with_all_gradients(d_model, n_kv_head, qk_norm):
    for n_layer, (batch, length) in ((2, (1, 7)), (4, (3, 1)), (PAGE + 3, (2, 5))):
        pair = pair_of(n_layer=n_layer, d_model=d_model, n_kv_head=n_kv_head, qk_norm=qk_norm)
        assert_same_step(*pair, some_tokens(pair[0], batch, length))
    pair = pair_of(d_model=d_model, n_kv_head=n_kv_head, qk_norm=qk_norm, rotate_depth_keys=True)
    assert_same_step(*pair, some_tokens(pair[0]))


def test_so_it_does_with_plain_attention_where_no_kernel_fits(monkeypatch):
    monkeypatch.setattr(_fused_attention, "kernel_for", lambda q, k, v: PLAIN)
    for n_kv_head in (2, 4):
        pair = pair_of(n_kv_head=n_kv_head)
        assert_same_step(*pair, some_tokens(pair[0]))


class WithoutDepth(MoDA):
    def read(self, state, *, sublayer):
        return state.x, Memory((), (), capacity=0)


def test_without_its_depth_part_it_is_pre_ln():
    model, plain = model_of(WithoutDepth), build_model("pre_ln", **SMALL).double()
    plain.load_state_dict({name: weight for name, weight in model.state_dict().items() if "depth_" not in name})
    tokens = some_tokens(model)
    assert_near(model(tokens), plain(tokens), 1e-12)


@forms
def test_one_block_is_pre_ln_without_extra_parameters(form):
    model, plain = model_of(form, n_layer=1), build_model("pre_ln", **SMALL | {"n_layer": 1}).double()
    plain.load_state_dict(model.state_dict())
    assert_near(model(some_tokens(model)), plain(some_tokens(model)), 1e-12)


def test_extra_parameters_are_the_published_ones():
    published = Shape(n_layer=36, d_model=1024, n_head=16, n_kv_head=8, head_dim=64, d_ff=2736, vocab_size=50304)
    assert MoDA.params_extra(published) == 35 * 2 * 1024 * 512 == round(705.7e6 - 669.0e6, -5) + 160


def test_extra_flops_are_those_of_its_matrix_products():
    shape, length = Shape(n_layer=4, d_model=16, n_head=4, n_kv_head=2, head_dim=4, d_ff=24, vocab_size=13), 6
    counts = []
    for form in (NaiveMoDA, "pre_ln"):
        model = build_model(form, **shape.model_kwargs())
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
            model(some_tokens(model, 1, length))
        counts.append(counter.get_total_flops())
    assert counts[0] - counts[1] == MoDA.flops_extra(shape, length)


@pytest.mark.parametrize("block", [1, 2])
@torch.no_grad()
def test_zero_logits_give_depth_its_share_of_the_entries(block):
    """With zero queries, depth values of one, own values of zero and an identity at the output, the branch is the depth mass."""
    model = model_of()
    state = model.run(model.embed(some_tokens(model, length=9)), 0, block)
    core = model.blocks[block].attention.core
    for weight in (core.q_proj.weight, core.v_proj.weight):
        weight.zero_()
    core.o_proj.weight.copy_(torch.eye(16))
    assert len(state.values) == 2 * block
    state = state._replace(values=tuple(torch.ones_like(value) for value in state.values))
    x, carry = model.residual.read(state, sublayer=2 * block)
    mass, _ = model.blocks[block].attention(x, carry, rotation_for(x, model.config.head_dim))
    expected = torch.tensor([2 * block / (t + 1 + 2 * block) for t in range(9)], dtype=torch.float64)
    assert_near(mass, expected[None, :, None].expand_as(mass), 1e-12)


@torch.no_grad()
def test_a_write_of_one_token_reaches_that_token_only():
    model = model_of()
    state = model.run(model.embed(some_tokens(model)), 0, 1)
    for field in ("keys", "values"):
        others = tuple(write.clone() for write in getattr(state, field))
        for write in others:
            write[:, 3] += 1
        changed = state._replace(**{field: others})
        before, after = (
            model.blocks[1].attention(s.x, model.residual.read(s, sublayer=2)[1], rotation_for(s.x, model.config.head_dim))[0]
            for s in (state, changed)
        )
        assert ((before - after).abs().amax(dim=(0, 2)) > 1e-9).tolist() == [False, False, False, True, False, False]


def test_depth_logits_are_free_of_position_only_with_rotated_depth_keys(monkeypatch):
    """Rotated from another position on, all that is left in a sequence's own logits is distances."""

    def later(branch_in, head_dim):
        longer = branch_in.new_empty(1, branch_in.shape[1] + 5, 1)
        return rotation_for(longer, head_dim)[:, 5:]

    for rotated in (True, False):
        model = model_of(rotate_depth_keys=rotated)
        before = model(some_tokens(model))
        with monkeypatch.context() as patch:
            for module in ("nn.model", "residuals.moda"):
                patch.setattr(f"depthbench.{module}.rotation_for", later)
            change = (model(some_tokens(model)) - before).abs().max()
        assert change < 1e-12 if rotated else change > 1e-3


# Skip, swap, statistics -----------------------------------------------------------------------------------------------------------


@forms
@pytest.mark.parametrize("rule", ["zeros", "dropped"])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_skipping_a_block_follows_the_rule(form, block, rule):
    model = model_of(form)
    tokens = some_tokens(model)
    state = model.residual.skip(model.run(model.embed(tokens), 0, block), block=block, rule=rule)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    expected = moda.logits(weights, tokens, model.config, skip=block, rule=rule)
    assert_near(model.logits(model.run(state, block + 1)), expected, 1e-10)


@pytest.mark.parametrize("rule", ["zeros", "dropped"])
def test_gradients_pass_a_skipped_block(rule):
    pair = pair_of(n_layer=4)
    values = []
    for model in pair:
        tokens = some_tokens(model)
        state = model.residual.skip(model.run(model.embed(tokens), 0, 1), block=1, rule=rule)
        used = {name: p for name, p in model.named_parameters() if not name.startswith("blocks.1.")}
        values.append(gradients(model.logits(model.run(state, 2)), used))
    for name, expected in values[1].items():
        assert_near(values[0][name], expected, 1e-12, name)


def test_swapping_with_the_last_block_leaves_its_missing_projection_in_place():
    model = model_of()
    first, last = (block.feed_forward.core for block in (model.blocks[0], model.blocks[2]))
    depth, up = first.depth_k_proj.weight.detach().clone(), last.up_proj.weight.detach().clone()
    with model.swapped(0, 2):
        assert torch.equal(first.depth_k_proj.weight, depth)
        assert torch.equal(first.up_proj.weight, up)


def test_the_gradient_on_the_depth_state_is_that_on_the_stream():
    model = model_of()
    state = model.run(model.embed(some_tokens(model)), 0, 2)
    on_x, on_key = torch.autograd.grad(model.logits(model.run(state, 2)).square().sum(), (state.x, state.keys[1]))
    of_gradients = state._replace(x=on_x, keys=(on_key,) * 4, values=(on_key,) * 4)
    assert torch.equal(model.residual.depth_gradient(of_gradients, block=2), on_x)


# States are values, in backward too -----------------------------------------------------------------------------------------------


def loss_of(logits):
    return (logits * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)).sum()


def gradients_of(loss_from):
    """Of the parameters, for the fast form and for the naive one; ``loss_from(model, tokens)`` is what is derived."""
    found = []
    for model in pair_of(n_layer=4):
        loss_from(model, some_tokens(model)).backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    return found


def assert_same_gradients(loss_from):
    fast, naive = gradients_of(loss_from)
    for name, expected in naive.items():
        assert (fast[name] is None) == (expected is None), name
        if expected is not None:
            assert_near(fast[name], expected, 1e-12, name)


def test_runs_from_one_state_add_up_their_gradients():
    def loss(model, tokens):
        state = model.run(model.embed(tokens), 0, 2)
        skipped = model.run(model.residual.skip(state, block=2), 3)
        last = model.run(state, 2, 3)
        runs = (model.run(state, 2), skipped, model.run(last, 3), model.run(last, 3))
        return sum(weight * loss_of(model.logits(run)) for weight, run in enumerate(runs, 1))

    assert_same_gradients(loss)


def test_runs_may_take_turns():
    def loss(model, tokens):
        left = right = model.run(model.embed(tokens), 0, 1)
        for block in (1, 2, 3):
            left, right = model.run(left, block, block + 1), model.run(right, block, block + 1)
        return loss_of(model.logits(left)) + 2 * loss_of(model.logits(right))

    assert_same_gradients(loss)


def test_an_early_exit_takes_part():
    def loss(model, tokens):
        early = model.run(model.embed(tokens), 0, 2)
        return loss_of(model.logits(early)) + loss_of(model.logits(model.run(early, 2)))

    assert_same_gradients(loss)


def test_a_backward_pass_counts_nothing_of_the_one_before():
    """Neither the same loss a second time, nor an early exit after a pass that stopped before it had come to the first block."""

    def loss(model, tokens):
        early = model.run(model.embed(tokens), 0, 2)
        late = loss_of(model.logits(model.run(early, 2)))
        torch.autograd.grad(late, model.blocks[2].attention.core.q_proj.weight, retain_graph=True)
        loss_of(model.logits(early)).backward(retain_graph=True)
        late.backward(retain_graph=True)
        return late

    assert_same_gradients(loss)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_run_from_given_tensors_gives_them_their_gradients(frozen):
    fast, naive = pair_of(n_layer=PAGE + 4)
    with torch.no_grad():
        given = fast.run(fast.embed(some_tokens(fast)), 0, 2)
    fast.requires_grad_(not frozen)
    keys, values = (tuple(write.clone().requires_grad_() for write in writes) for writes in (given.keys, given.values))
    x = given.x.clone().requires_grad_()
    state = given._replace(x=x, keys=keys, values=values)
    expected_state = naive.embed(some_tokens(naive))._replace(x=x, keys=torch.stack(keys), values=torch.stack(values))
    leaves = (x, *keys, *values)
    found = torch.autograd.grad(loss_of(fast.logits(fast.run(state, 2))), leaves)
    expected = torch.autograd.grad(loss_of(naive.logits(naive.run(expected_state, 2))), leaves)
    for mine, theirs in zip(found, expected, strict=True):
        assert_near(mine, theirs, 1e-12)


def test_gradients_reach_the_writes_of_a_state_on_the_way():
    fast, naive = pair_of()
    state, other = (model.run(model.embed(some_tokens(model)), 0, 1) for model in (fast, naive))
    found = torch.autograd.grad(loss_of(fast.logits(fast.run(state, 1))), (*state.keys, *state.values))
    expected = torch.autograd.grad(loss_of(naive.logits(naive.run(other, 1))), (other.keys, other.values))
    for mine, theirs in zip(found, (*expected[0], *expected[1]), strict=True):
        assert_near(mine, theirs, 1e-12)


def test_a_run_without_gradients_leaves_nothing_on_the_tape_and_one_with_them_clears_it():
    model = model_of()
    with torch.no_grad():
        state = model.run(model.embed(some_tokens(model)))
        again = model.run(model.embed(some_tokens(model)), 0, 2)
    assert state.memory.tick is None and again.memory.read == 0
    state = model.run(model.embed(some_tokens(model)))
    tape = state.memory.buffer.tape
    assert state.memory.tick.requires_grad
    loss_of(model.logits(state)).backward()
    assert tape._rows == tape._summed == ()
    assert not tape.in_use


@torch.no_grad()
def test_a_state_from_inference_mode_goes_on_outside():
    model = model_of()
    tokens = some_tokens(model)
    with torch.inference_mode():
        state = model.run(model.embed(tokens), 0, 1)
    assert_near(model.logits(model.run(state, 1)), model(tokens), 1e-14)


def test_a_state_from_one_precision_goes_on_in_another():
    model = build_model("moda", **SMALL)
    randomise(model)
    tokens = some_tokens(model)
    with torch.autocast("cpu", torch.bfloat16):
        state = model.run(model.embed(tokens), 0, 1)
    assert {write.dtype for write in (*state.keys, *state.values)} == {torch.bfloat16}
    after = model.run(state, 1, 2)
    assert {write.dtype for write in after.keys[2:]} == {torch.float32}
    assert torch.equal(after.memory.buffer.keys[..., 2, :], after.keys[2])  # and was not rounded to what lay there before
    model.logits(model.run(after, 2)).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("first_in_bf16", [True, False])
def test_readings_of_one_backward_pass_may_differ_in_precision(first_in_bf16):
    model = randomise(build_model("moda", **SMALL | {"n_layer": 4}), spread=0.05)
    parameters, tokens = dict(model.named_parameters()), some_tokens(model, length=9)
    expected = gradients(model(tokens), parameters)
    state = model.embed(tokens)
    for part, halves in enumerate((first_in_bf16, not first_in_bf16)):
        with torch.autocast("cpu", torch.bfloat16, enabled=halves):
            state = model.run(state, 2 * part, 2 * part + 2)
    found = gradients(model.logits(state), parameters)
    mine, theirs = (torch.cat([gradient.flatten() for gradient in of.values()]) for of in (found, expected))
    assert (mine - theirs).norm() < 0.05 * theirs.norm()


def test_bf16_autocast_stays_near_fp32_in_its_gradients_too():
    torch.manual_seed(0)
    model = randomise(build_model("moda", **SMALL | {"n_layer": PAGE + 4, "qk_norm": True}), spread=0.05)
    parameters, tokens = dict(model.named_parameters()), some_tokens(model, length=16)
    expected = gradients(model(tokens), parameters)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(model(tokens), parameters)
    for kind in {name.split(".", 2)[-1] for name in parameters}:  # of all blocks together: single ones may be small
        mine, theirs = (torch.cat([of[name].flatten() for name in of if name.endswith(kind)]) for of in (found, expected))
        assert (mine - theirs).norm() < 0.1 * theirs.norm(), kind


# The pieces -----------------------------------------------------------------------------------------------------------------------


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def readings(*tensors):
    """Three readings that build on each other, of two writes and then of three; in ``tensors`` these writes, then q, k, v."""
    *writes, q, k, v = tensors
    memory = Memory((), (), capacity=1).write(*writes[:2]).write(*writes[2:4])
    first, memory = memory.attend(q, k, v)
    second, memory = memory.write(*writes[4:6]).attend(first, k, v)
    return first, second, memory.attend(q, k, second[:, :, : k.shape[2]])[0]


@pytest.mark.parametrize("n_kv_head", [1, 2])
def test_custom_gradients(n_kv_head):
    heads = [random(2, 3, n_kv_head, 4, seed=seed).requires_grad_() for seed in range(8)]
    q = random(2, 3, 2, 4, seed=9).requires_grad_()
    assert gradcheck(readings, (*heads[:6], q, *heads[6:]))


def test_a_reading_whose_output_is_not_used_adds_nothing_and_passes_on_what_later_ones_leave():
    heads = [random(2, 3, 2, 4, seed=seed).requires_grad_() for seed in range(9)]
    *writes, q, k, v = heads
    memory = Memory((), (), capacity=6).write(*writes[:2])
    _, unused = memory.attend(q, k, v)
    out, _ = unused.write(*writes[2:4]).attend(q, k, v)
    expected, _ = Memory((), (), capacity=6).write(*writes[:2]).write(*writes[2:4]).attend(q, k, v)
    used = (*writes[:4], q, k, v)
    pairs = zip(torch.autograd.grad(out.square().sum(), used), torch.autograd.grad(expected.square().sum(), used), strict=True)
    for mine, theirs in pairs:
        assert_near(mine, theirs, 1e-13)


def test_writes_that_point_far_away_from_the_query_change_nothing():
    q, k, v, value = (random(2, 5, 2, 4, seed=seed) for seed in range(4))
    out, _ = Memory((), (), capacity=1).write(-1e4 * q, value).attend(q, k, v)
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
    assert_near(out, expected, 1e-14)
    out, _ = Memory((), (), capacity=1).write(1e4 * q, value).attend(q, k, v)  # and towards it, everything
    assert_near(out, value, 1e-14)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 5e-3)]
)
def test_fused_attention_equals_plain_attention_also_with_the_lse_of_a_larger_softmax(dtype, tolerance):
    for (n_head, n_kv_head, width), (batch, length) in product([(4, 4, 8), (4, 2, 6), (3, 1, 38)], [(2, 7), (1, 1)]):
        q, grad = (random(batch, length, n_head, width, seed=seed, dtype=dtype) for seed in (0, 1))
        k, v = (random(batch, length, n_kv_head, width, seed=seed, dtype=dtype) for seed in (2, 3))
        out, lse, extra = CPU.forward(q, k, v)
        expected_out, expected_lse, _ = PLAIN.forward(q, k, v)
        assert_near(out, expected_out, tolerance)
        assert_near(lse, expected_lse, tolerance)
        found = CPU.backward(grad, q, k, v, out, lse + 1, extra)
        expected = PLAIN.backward(grad, q, k, v, out, lse + 1, None)
        for mine, theirs in zip((out, *found), (expected_out, *expected), strict=True):
            assert mine.dtype == theirs.dtype == dtype and mine.shape == theirs.shape
            assert_near(mine, theirs, tolerance)


@pytest.mark.parametrize("kernel", [FLASH, EFFICIENT], ids=["flash", "efficient"])
@pytest.mark.parametrize(("n_kv_head", "width", "length"), [(4, 32, 64), (2, 38, 50)])
def test_the_calls_for_a_gpu_fit_their_kernels(kernel, n_kv_head, width, length):
    """Names, arguments and shapes, on tensors without data; no more can be held without a GPU."""
    with torch.device("meta"):
        q, k, v = (torch.empty(2, length, heads, width, dtype=torch.bfloat16) for heads in (4, n_kv_head, n_kv_head))
    out, lse, extra = kernel.forward(q, k, v)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    assert [grad.shape for grad in kernel.backward(q, q, k, v, out, lse, extra)] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("rotate_depth_keys", [False, True])
def test_compiled_the_regions_are_few_whatever_the_depth(rotate_depth_keys):
    model = build_model("moda", **SMALL | {"n_layer": 24}, rotate_depth_keys=rotate_depth_keys)
    model.compile_regions(backend="eager")
    counters.clear()
    model(some_tokens(model)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 3  # what attention projects; a feed-forward that writes; the last, which does not
