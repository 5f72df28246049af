"""Each check fails for a design that is broken in just its way, and says so: a check that cannot fail holds nothing."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
import torch
from torch import nn

from depthbench import contract
from depthbench.nn.sublayer import Sublayer
from depthbench.residuals.base import LinearForm, SingleStream, Stream
from depthbench.residuals.pre_ln import PreLN


class Peeks(PreLN):
    def read(self, state, *, sublayer):
        return state.x + state.x.roll(-1, 1), None


class WithScale(PreLN):
    """A parameter of its own, by which every branch is multiplied."""

    def __init__(self, config):
        super().__init__(config)
        self.scale = nn.Parameter(torch.empty(config.n_sublayer))

    def reset_parameters(self):
        nn.init.ones_(self.scale)

    def scale_of(self, state, sublayer):
        return self.scale[sublayer]

    def write(self, state, carry, branch_out, emitted, *, sublayer):
        return Stream(state.x + self.scale_of(state, sublayer) * branch_out)

    @classmethod
    def params_extra(cls, shape, **options):
        return 2 * shape.n_layer


class NeverLearns(WithScale):
    def scale_of(self, state, sublayer):
        return 1 + 0 * self.scale[sublayer]


class NotInTheGraph(WithScale):
    def scale_of(self, state, sublayer):
        return 1.0


class NoResidual(PreLN):
    def write(self, state, carry, branch_out, emitted, *, sublayer):
        return Stream(branch_out)


class ReadsNothing(PreLN):
    def read(self, state, *, sublayer):
        return torch.ones_like(state.x), None


class EightHeadsOnly(PreLN):
    def read(self, state, *, sublayer):
        return state.x.unflatten(-1, (8 // self.config.n_kv_head, -1)).flatten(-2) if self.config.n_kv_head < 4 else state.x[..., :8], None


class MixesTheBatch(PreLN):
    def read(self, state, *, sublayer):
        return state.x - state.x.mean(0), None


class DrawsInTheConstructor(PreLN):
    def __init__(self, config):
        super().__init__(config)
        self.factor = 1 + torch.rand((), device="cpu").item()

    def write(self, state, carry, branch_out, emitted, *, sublayer):
        return Stream(state.x + self.factor * branch_out)


class ConstantInABuffer(PreLN):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("factor", torch.tensor(0.5))

    def write(self, state, carry, branch_out, emitted, *, sublayer):
        return Stream(state.x + self.factor * branch_out)


class InitialisesInTheConstructor(PreLN):
    def __init__(self, config):
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(()))

    def write(self, state, carry, branch_out, emitted, *, sublayer):
        return Stream(state.x + self.scale * branch_out)


class RenamesTheCore(PreLN):
    class Wrapped(nn.Module):
        def __init__(self, core):
            super().__init__()
            self.inner = core

        def forward(self, *given):
            return self.inner(*given)

    def build_sublayer(self, config, *, sublayer):
        plain = super().build_sublayer(config, sublayer=sublayer)
        return Sublayer(plain.norm, self.Wrapped(plain.core))


class Miscounts(WithScale):
    @classmethod
    def params_extra(cls, shape, **options):
        return 2 * shape.n_layer + 1


class ExemptsAStranger(PreLN):
    def no_decay_parameters(self):
        return [nn.Parameter(torch.zeros(2, 2))]


class TabulatesAStranger(PreLN):
    def tables_of_vectors(self):
        return [nn.Parameter(torch.zeros(2, 2))]


class AddsUpInPlace(PreLN):
    """It keeps a sum of all that was added, in a buffer of the run that opened the state."""

    def open(self, embedding):
        self.total = torch.zeros_like(embedding)
        return super().open(embedding)

    def write(self, state, carry, branch_out, emitted, *, sublayer):
        self.total += branch_out.detach()
        return super().write(state, carry, branch_out, emitted, sublayer=sublayer)


class CountsItsReads(PreLN):
    """What a sublayer reads depends on how often the module was asked."""

    reads = 0

    def read(self, state, *, sublayer):
        self.reads += 1
        return state.x + 0.01 * self.reads, None


class Ahead(NamedTuple):
    x: torch.Tensor
    scale: torch.Tensor  # of all sublayers, made at the start


class StaleCache(WithScale):
    """It forgets to rebuild in ``begin`` what it made from later weights in ``open``."""

    def open(self, embedding):
        return Ahead(embedding, 2 * self.scale)

    def write(self, state, carry, branch_out, emitted, *, sublayer):
        return Ahead(state.x + state.scale[sublayer] * branch_out, state.scale)

    def swap_parameters(self, blocks, *, block):
        return super().swap_parameters(blocks, block=block) | {"scale": self.scale[2 * block : 2 * block + 2]}


class WritesIntoTheState(PreLN):
    def write(self, state, carry, branch_out, emitted, *, sublayer):
        return Stream(state.x.add_(branch_out))


class OneStreamForAll(PreLN):
    """The stream lies in the module: whichever run began last has it."""

    def begin(self, state, *, block):
        self.now = state.x
        return state

    def read(self, state, *, sublayer):
        return self.now, None

    def write(self, state, carry, branch_out, emitted, *, sublayer):
        self.now = self.now + branch_out
        return Stream(self.now)


class DetachesAtBoundaries(PreLN):
    def begin(self, state, *, block):
        return Stream(state.x.detach()) if block else state


class ScaledByItself(torch.autograd.Function):
    """x^2 / 2, whose backward takes x from where the last forward left it."""

    @staticmethod
    def forward(ctx, x):
        ScaledByItself.x = x
        return x * x / 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ScaledByItself.x


class RemembersOnePassOnly(PreLN):
    def close(self, state, final_norm, *, block):
        return final_norm(ScaledByItself.apply(state.x))


class ClosesElsewhere(PreLN):
    def close(self, state, final_norm, *, block):
        return final_norm(state.x + 1)


class DoublesTheGradient(PreLN):
    def depth_gradient(self, gradients, *, block):
        return 2 * gradients.x


class DoublesAWeight(PreLN):
    def linear(self, state, *, sublayer, branch_out=None):
        form = super().linear(state, sublayer=sublayer)
        return LinearForm(form.read, form.mix, None if form.write is None else 2 * form.write)


class BareState(SingleStream):
    """Its state is a tensor."""

    def open(self, embedding):
        return embedding

    def read(self, state, *, sublayer):
        return state, None

    def write(self, state, carry, branch_out, emitted, *, sublayer):
        return state + branch_out

    def readout(self, state, *, block):
        return state


class TakesAnyRule(PreLN):
    def skip(self, state, *, block, rule=None):
        return state


class SwapsOneWay(PreLN):
    @torch.no_grad()
    def swap(self, blocks, *, first, second):
        blocks[first].load_state_dict(blocks[second].state_dict())


class Outputs(NamedTuple):
    x: torch.Tensor
    outputs: tuple[torch.Tensor, ...]


class GrowingListInARegion(PreLN):
    """A graph for every length of the list."""

    total = staticmethod(sum)

    def open(self, embedding):
        return Outputs(embedding, (embedding,))

    def write(self, state, carry, branch_out, emitted, *, sublayer):
        outputs = (*state.outputs, branch_out)
        return Outputs(self.total(outputs), outputs)

    def compile_regions(self, compile_region):
        self.total = compile_region(lambda outputs: sum(outputs))


class RoundsTheStream(PreLN):
    """Under autocast the stream is kept in bf16, on top of something large."""

    def write(self, state, carry, branch_out, emitted, *, sublayer):
        x = state.x + branch_out
        return Stream((x + 8).to(branch_out.dtype).to(x.dtype) - 8)


BROKEN = [
    ("is_causal", Peeks, "another token at position 3 changes the logits at earlier positions"),
    ("every_parameter_gets_a_gradient", NeverLearns, "one of zero, away from the initial values: residual.scale"),
    ("every_parameter_is_in_the_graph_at_init", NotInTheGraph, "not part of the graph of the first step: residual.scale"),
    ("the_state_is_carried_on", NoResidual, "added to a state of zeros, the logits change by 0.0e[+]00 only"),
    ("the_state_is_carried_on", ReadsNothing, "read from a state of zeros, the logits change by 0.0e[+]00 only"),
    ("heads_may_be_shared_and_normed", EightHeadsOnly, r"RuntimeError: "),
    ("any_batch_and_length_work", MixesTheBatch, "one sequence of the batch: logits off by"),
    ("a_checkpoint_restores_the_function", DrawsInTheConstructor, "that loads another's state_dict does not give its logits"),
    ("meta_build_equals_direct_build", ConstantInABuffer, "does not set all of residual.factor"),
    ("meta_build_equals_direct_build", InitialisesInTheConstructor, "does not set all of residual.scale"),
    ("what_is_shared_with_pre_ln_is_equal", RenamesTheCore, "under Pre-LN's name and shape: blocks.0.attention.core.q_proj.weight, "),
    ("extra_parameters_equal_their_formula", Miscounts, "params_extra says 7 at 3 blocks of width 16, the model has 6 beyond"),
    ("parameter_groups_are_complete", ExemptsAStranger, "no_decay_parameters names a tensor that is no parameter of the model"),
    ("parameter_groups_are_complete", TabulatesAStranger, "tables_of_vectors names a tensor that is no parameter of the model"),
    ("a_run_restarts_at_every_boundary", AddsUpInPlace, "Inplace update to inference tensor"),
    ("a_run_restarts_at_every_boundary", CountsItsReads, "restarted before block 0: off by"),
    ("a_run_restarts_after_later_blocks_changed_places", StaleCache, "before block 1, with blocks 1 and 2 swapped: off by"),
    ("states_are_never_changed", WritesIntoTheState, "changed after it was handed over: the opened state"),
    ("two_runs_from_one_state_keep_apart", OneStreamForAll, "beside which another went on from the same state: off by"),
    ("gradients_pass_every_boundary", DetachesAtBoundaries, "gradient of embedding.weight, cut before block 1|no tensor of the state gets"),
    ("backward_may_come_in_any_order", RemembersOnePassOnly, "from the first of two passes: off by"),
    ("depth_states_and_readouts_exist", ClosesElsewhere, "direction of close against the last readout, normed: off by"),
    ("depth_gradients_exist", DoublesTheGradient, "at boundary 1, the loss's derivative along a random direction: off by"),
    ("the_linear_form_composes", DoublesAWeight, "the weighted sum of sources that sublayer 1 reads: off by"),
    ("taps_see_every_sublayer", BareState, "a state is a Tensor, not a NamedTuple"),
    ("skipping_a_block_follows_the_rules", TakesAnyRule, "skip accepts a rule 'no such'"),
    ("swapping_twice_is_the_identity", SwapsOneWay, "blocks 0 and 2 exchanged and put back: blocks.0.attention"),
    ("compiled_equals_eager", GrowingListInARegion, "FailOnRecompileLimitHit|more than 4"),
    ("bf16_stays_near_fp32", RoundsTheStream, r"off by \d+.\d% of"),
]


@pytest.mark.parametrize(("name", "design", "says"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_the_check_fails_and_says_what_is_wrong(name, design, says):
    (outcome,) = contract.outcomes(design, only=[name])
    assert outcome.verdict == "FAILED"
    assert re.search(says, outcome.message), outcome.message


def test_there_is_a_broken_design_for_every_check():
    """That of the two processes is in test_contract.py, which starts them once for all."""
    assert {name for name, _, _ in BROKEN} | {"two_processes_equal_one"} == {*contract.CHECKS}


def test_a_class_that_other_processes_cannot_import_is_not_defined_for_them():
    class Local(PreLN):
        pass

    with pytest.raises(contract.NotDefined, match="other processes cannot import .*Local: put it at the top of a module"):
        contract.two_processes_equal_one(Local)


def test_all_checks_can_be_called_by_name_from_the_package():
    assert [name for name in contract.CHECKS if getattr(contract, name) is not contract.CHECKS[name]] == []
    assert {*contract.CHECKS} < {*contract.__all__}
