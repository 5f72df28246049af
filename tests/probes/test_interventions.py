"""Blocks left out and exchanged: from a stored state as in a whole pass, what the designs make of it by hand, and the model put back."""

from __future__ import annotations

import weakref
from itertools import combinations

import pytest
import torch

from depthbench import build_model
from depthbench.contract.subject import tensors_of
from depthbench.probes.causal import causal, skips
from depthbench.probes.permutation import permutation
from depthbench.probes.pruning import pruning
from depthbench.residuals.base import SingleStream, Stream
from tests.probes.crafted import every_design_in_use, model_of, some_windows

PROBES = [causal, pruning, permutation, skips]


# From a stored state as in a whole pass -------------------------------------------------------------------------------------------


def assert_prefixes_serve(model, pairs):
    """Every block left out, and pairs exchanged, from the states of a run without: to the bit as in a whole pass."""
    tokens, n_layer = some_windows()[:, :-1], len(model.blocks)
    states = list(model.boundaries(model.embed(tokens)))
    for rule in model.residual.skip_rules:
        for block in range(n_layer):
            with model.skipped(block, rule):
                assert torch.equal(model.logits(model.run(states[block], block)), model(tokens)), (rule, block)
    for first, second in pairs:
        with model.swapped(first, second):
            assert torch.equal(model.logits(model.run(states[first], first)), model(tokens)), (first, second)
            with model.skipped(second):
                assert torch.equal(model.logits(model.run(states[first], first)), model(tokens)), (first, second)
    assert torch.equal(model.logits(model.run(states[1], 1)), model(tokens))


@torch.no_grad()
@every_design_in_use
def test_a_stored_prefix_equals_a_whole_pass_to_the_bit(design):
    assert_prefixes_serve(model_of(design, n_layer=6), [(0, 5), (1, 2), (2, 4), (4, 5)])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group_size", [1, 3, 4, 5, 11])
def test_and_so_it_does_where_mixes_come_in_rounds(group_size, dtype):
    """26 mixes, in rounds of 8 or less."""
    assert_prefixes_serve(model_of("block_attnres", n_layer=13, group_size=group_size, dtype=dtype), [(0, 12), (3, 4), (7, 10)])


# Attention residuals by hand ------------------------------------------------------------------------------------------------------

# Four blocks in groups of two: blocks 0 and 1 are group 1, blocks 2 and 3 group 2. b_0 is the embedding, f_k what sublayer k adds.


@pytest.fixture
def attnres():
    return model_of("block_attnres", n_layer=4, group_size=4, dtype=torch.float64)


def look(model, skipped, rule):
    """Of a run without the block: what sublayers added and read, and depth states by boundary."""
    added, read, z = {}, {}, {}

    def keep(name, sublayer, value):
        {"branch_out": added, "branch_in": read}.get(name, {})[sublayer] = value

    with torch.no_grad(), model.skipped(skipped, rule), model.taps(keep):
        for boundary, state in enumerate(model.boundaries(model.embed(some_windows()[:, :-1]))):
            z[boundary] = model.residual.depth_state(state, block=boundary)
    return added, read, z


def mix(model, k, *sources):
    """h_k of the sources: weights softmax(w_k . (gamma_k * rms(b)))."""
    query, gamma, eps = model.residual.queries[k - 1], model.residual.key_norms[k - 1], model.config.norm_eps
    logits = [(query * gamma * b / (b.square().mean(-1, keepdim=True) + eps).sqrt()).sum(-1) for b in sources]
    weights = torch.stack(logits).exp()
    return (weights / weights.sum(0)).unsqueeze(-1).mul(torch.stack(sources)).sum(0)


def same(found, expected):
    return torch.allclose(found, expected, rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("rule", ["reference", "renormalise"])
def test_skipped_before_a_group_boundary(attnres, rule):
    """Block 1 closes group 1, which is left with b_1 = f_0 + f_1. Block 2 reads b_1 alone, or the mix of b_0 and b_1."""
    f, h, z = look(attnres, 1, rule)
    b = [z[0], f[0] + f[1]]
    assert same(z[1], b[1])
    expected = b[1] if rule == "reference" else mix(attnres, 4, *b)
    assert same(z[2], expected) and same(h[4], expected)
    assert same(h[5], mix(attnres, 5, *b, f[4]))  # from there on the sources are the same under both rules
    assert same(z[3], f[4] + f[5]) and same(h[6], mix(attnres, 6, *b, z[3]))
    assert same(z[4], mix(attnres, 8, *b, f[4] + f[5] + f[6] + f[7]))


@torch.no_grad()
@pytest.mark.parametrize("rule", ["reference", "renormalise"])
def test_skipped_where_it_opens_a_group(attnres, rule):
    """Block 2 opens group 2 and block 3 does not. By ``reference`` there is no group 2: block 3 reads b_0 and the running sum b_1, and adds
    to it. By ``renormalise`` the group is empty when block 3 reads, and becomes f_6 + f_7."""
    f, h, z = look(attnres, 2, rule)
    b_0, b_1 = z[0], f[0] + f[1] + f[2] + f[3]
    assert same(z[2], mix(attnres, 4, b_0, b_1))
    assert same(h[6], mix(attnres, 6, b_0, b_1))
    if rule == "reference":
        assert same(z[3], b_1)
        assert same(h[7], mix(attnres, 7, b_0, b_1 + f[6])) and same(z[4], mix(attnres, 8, b_0, b_1 + f[6] + f[7]))
    else:
        assert (z[3] == 0).all()
        assert same(h[7], mix(attnres, 7, b_0, b_1, f[6])) and same(z[4], mix(attnres, 8, b_0, b_1, f[6] + f[7]))


@torch.no_grad()
@pytest.mark.parametrize("rule", ["reference", "renormalise"])
def test_skipped_inside_a_group(rule):
    """All of 0, 1, 2 in one group of six sublayers, block 3 the next: block 1 stands inside. Both rules leave out f_2 and f_3, no more."""
    model = model_of("block_attnres", n_layer=4, group_size=6, dtype=torch.float64)
    f, h, z = look(model, 1, rule)
    assert same(z[1], f[0] + f[1]) and torch.equal(z[2], z[1])
    assert same(h[4], mix(model, 4, z[0], z[2])) and same(h[5], mix(model, 5, z[0], z[2] + f[4]))
    assert same(z[3], mix(model, 6, z[0], f[0] + f[1] + f[4] + f[5]))


@torch.no_grad()
def test_skipped_before_the_readout(attnres):
    """Block 3 is the last: the readout is the newest source, the open group's sum f_4 + f_5, or the mix of all."""
    f, _, z = look(attnres, 3, "reference")
    assert same(z[4], f[4] + f[5])
    f, _, z = look(attnres, 3, "renormalise")
    assert same(z[4], mix(attnres, 8, z[0], f[0] + f[1] + f[2] + f[3], f[4] + f[5]))


@torch.no_grad()
def test_a_boundary_mix_moves_with_the_block_before_it():
    """Full attention residuals: with blocks 0 and 2 exchanged, mixes 1 and 2 (inner and right) change places with 5 and 6; mix 4, block 2's
    own attention side, stays."""
    model = model_of("full_attnres", dtype=torch.float64)
    before = model.residual.queries.clone()
    with model.swapped(0, 2):
        assert torch.equal(model.residual.queries, before[[4, 5, 2, 3, 0, 1]])
    assert torch.equal(model.residual.queries, before)


@torch.no_grad()
def test_a_skipped_moda_block_leaves_zeros_that_take_part():
    model, tokens = model_of("moda", n_layer=4, dtype=torch.float64), some_windows()[:, :-1]
    kept = {}
    for rule in ("zeros", "dropped"):
        with model.skipped(1, rule):
            kept[rule] = model.run(model.embed(tokens), 0, 3)
    zeros, dropped = kept["zeros"], kept["dropped"]
    assert [bool((write == 0).all()) for write in zeros.keys] == [False, False, True, True, False, False]
    assert [bool((write == 0).all()) for write in zeros.values] == [False, False, True, True, False, False]
    assert len(dropped.keys) == len(dropped.values) == 4
    assert not torch.allclose(zeros.x, dropped.x)  # block 2 gave the zeros a share


# The model put back ---------------------------------------------------------------------------------------------------------------


def snapshot(model):
    parameters = [(parameter.clone(), parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    rest = model._taps, model._left_out, getattr(model.residual, "scales", None), torch.is_grad_enabled()
    return parameters, modes, rest, torch.get_rng_state()


def assert_as_before(model, before):
    parameters, modes, rest, random = snapshot(model)
    assert all(torch.equal(now[0], then[0]) and now[1:] == then[1:] for now, then in zip(parameters, before[0], strict=True))
    assert (modes, rest) == before[1:3] and torch.equal(random, before[3])


class Fragile(SingleStream):
    """Draws a random number and raises at the given write."""

    writes_left = 10**6

    def write(self, state, carry, branch_out, emitted, *, sublayer):
        self.writes_left -= 1
        if not self.writes_left:
            torch.rand(())
            raise RuntimeError("in the middle")
        return Stream(state.x + branch_out)


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.__name__)
def test_an_exception_in_the_middle_of_an_intervention_leaves_everything_as_it_was(probe):
    model = model_of(Fragile, n_layer=3).train()
    model.blocks[0].eval()
    before = snapshot(model)
    for writes in (7, 9, 12):  # 6 are the whole pass
        model.residual.writes_left = writes
        with pytest.raises(RuntimeError, match="in the middle"):
            probe(model, some_windows(), micro_batch=3)
        assert_as_before(model, before)


@pytest.mark.parametrize("design", ["lns", "block_attnres", "moda", "hc"])
def test_an_interrupt_between_two_rows_leaves_everything_as_it_was(design):
    model = model_of(design).train()
    before = snapshot(model)

    def stop(done):
        if done > 0.4:
            raise KeyboardInterrupt

    for probe in PROBES:
        with pytest.raises(KeyboardInterrupt):
            probe(model, some_windows(), progress=stop)
        assert_as_before(model, before)


@torch.no_grad()
@pytest.mark.parametrize("design", ["pre_ln", "lns", "keel", "block_attnres", "moda", "mhc"])
def test_interventions_nest(design):
    """Exchanged, and exchanged again, a block left out: inside the innermost all hold, and each is undone on the way out."""
    model, tokens = model_of(design, n_layer=4), some_windows()[:, :-1]
    outputs = [model(tokens)]
    with model.swapped(0, 2):
        outputs.append(model(tokens))
        with model.skipped(1):
            outputs.append(model(tokens))
            with model.swapped(2, 3), model.skipped(3):
                outputs.append(model(tokens))
            assert torch.equal(model(tokens), outputs[2])
        assert torch.equal(model(tokens), outputs[1])
    assert torch.equal(model(tokens), outputs[0])
    assert all(not torch.allclose(one, other) for one, other in combinations(outputs, 2))


@torch.no_grad()
def test_the_inner_rule_holds_for_a_block_left_out_twice():
    model, tokens = model_of("block_attnres"), some_windows()[:, :-1]
    with model.skipped(1, "renormalise"):
        outer = model(tokens)
        with model.skipped(1, "reference"):
            inner = model(tokens)
        assert torch.equal(model(tokens), outer)
    with model.skipped(1):
        assert torch.equal(model(tokens), inner)
    assert not torch.allclose(inner, outer)


def test_a_block_that_is_not_there_is_refused():
    model = build_model("pre_ln", n_layer=2, d_model=16, n_head=2, vocab_size=29)
    for intervene in (lambda: model.skipped(2), lambda: model.skipped(-1), lambda: model.swapped(0, 2), lambda: model.swapped(-1, 0)):
        with pytest.raises(ValueError, match="there is no block"), intervene():
            pass


def test_a_probe_inside_an_intervention_sees_it():
    """The causal score of a model without block 1, which does nothing more when it is left out again."""
    model, windows = model_of("pre_ln"), some_windows()
    with model.skipped(1):
        frames = skips(model, windows)
    deltas = frames["pruning"].query("metric == 'delta'").value.tolist()
    assert deltas[1] == 0 and min(abs(deltas[0]), abs(deltas[2])) > 1e-4
    assert frames["causal"].value.iloc[0] == 0  # its step is none, hence C(0, 1) = 0


# Memory ---------------------------------------------------------------------------------------------------------------------------


def peaks_of(model, act):
    """After every sublayer that ``act`` runs, the bytes of all states made so far that are still there, each storage once."""
    alive, peaks = [], []

    def keep(name, sublayer, state):
        if name == "state_out":
            alive.extend(weakref.ref(tensor) for tensor in tensors_of(state))
            alive[:] = [reference for reference in alive if reference() is not None]
            storages = [reference().untyped_storage() for reference in alive]
            peaks.append(sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))

    with torch.no_grad(), model.taps(keep):
        act()
    assert not any(reference() is not None for reference in alive)
    return peaks


@pytest.mark.parametrize(("design", "carries"), [("pre_ln", 0), ("hc", 0), ("moda", 1), ("block_attnres", 1)])
def test_what_is_kept_is_bounded_and_does_not_grow(design, carries):
    """At most L + 2 depth states beside those of a whole pass, and in the 50th micro-batch as many as in the first. Where a state holds
    what all earlier sublayers wrote, what a whole pass carries is there twice: in the run with an intervention, and in the one without."""
    model, windows = model_of(design, n_layer=4), some_windows(windows=50)
    inputs = windows[:1, :-1]
    state = model.residual.depth_state(model.embed(inputs), block=0)
    whole = max(peaks_of(model, lambda: model(inputs)))
    for probe in (skips, pruning, permutation):
        peaks = peaks_of(model, lambda: probe(model, windows, micro_batch=1))  # noqa: B023
        each = len(peaks) // 50
        assert max(peaks[:each]) <= (1 + carries) * whole + (4 + 2) * state.nbytes
        assert max(peaks[each:]) <= max(peaks[:each])


@pytest.mark.parametrize("design", ["pre_ln", "lns", "hc", "block_attnres", "moda"])
@pytest.mark.parametrize("copies_before", [0, 1, 5])
def test_an_interrupt_inside_a_swap_or_while_putting_back_leaves_no_block_half_exchanged(design, copies_before, monkeypatch):
    """Whether Ctrl-C comes while the blocks change places or while they are put back: the model is whole afterwards."""
    model, copy, left = model_of(design), torch.Tensor.copy_, [copies_before]

    def interrupted(tensor, other):
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt
        return copy(tensor, other)

    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(some_windows()[:, :-1])
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", interrupted)
        with pytest.raises(KeyboardInterrupt), model.swapped(0, 1):
            pytest.fail("the swap was not interrupted")
        left[0] = 10**6
        with pytest.raises(KeyboardInterrupt), model.swapped(0, 1):
            left[0] = copies_before
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(some_windows()[:, :-1]), expected)
