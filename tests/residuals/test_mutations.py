"""Broken copies of the designs: the faults that public code has had, and a few that are as easy to make. Each must fail a check that
its design passes.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
import torch

from depthbench import residuals
from depthbench.residuals import mhc, moda
from depthbench.residuals.base import SingleStream
from tests.oracles.checks import GROUPED, equals_oracle, starts_as_pre_ln, starts_with_scaled_matrices

HC, MHC, KEEL, LNS, DeepNorm, SandwichLN = (residuals.get(name) for name in ("hc", "mhc", "keel", "lns", "deepnorm", "sandwich_ln"))
FullAttnRes, BlockAttnRes, MoDA = (residuals.get(name) for name in ("full_attnres", "block_attnres", "moda"))
THREE = GROUPED | {"n_layer": 3}


def without_final_norm(design):
    class Unnormed(design):
        def close(self, state, final_norm, *, block):
            return final_norm.weight * self.readout(state, block=block)

    return Unnormed


class ResidualsUnmixed(HC):
    """The width connection hands the old streams on: A_r learns nothing and does nothing."""

    @staticmethod
    def step(streams, *arguments):
        step, streams = HC.step(streams, *arguments)
        return step._replace(mix=torch.eye(streams.shape[-2], dtype=streams.dtype).expand_as(step.mix)), streams


class ResidualsMixedTransposed(HC):
    """A_r[t, s] instead of A_r[s, t]. Both are the identity at the start."""

    @staticmethod
    def step(streams, *arguments):
        step, streams = HC.step(streams, *arguments)
        return step._replace(mix=step.mix.mT), streams


class OldStreamsReadAfterMixing(HC):
    """The sublayer reads from the streams that were mixed already."""

    @staticmethod
    def step(streams, *arguments):
        step, streams = HC.step(streams, *arguments)
        return step._replace(read=torch.einsum("btu,btus->bts", step.read, step.mix)), streams


class StreamsExchangedTransposed(MHC):
    """H_res[s, t] instead of H_res[t, s]: rows and columns change roles."""

    @staticmethod
    def step(streams, *arguments):
        step, streams = MHC.step(streams, *arguments)
        return step._replace(mix=step.mix.mT), streams


class OutputsHalved(MHC):
    """H_post without its factor of 2."""

    @staticmethod
    def step(streams, *arguments):
        step, streams = MHC.step(streams, *arguments)
        return step._replace(write=step.write / 2), streams


class AlphaFromTheStart(KEEL):
    """The first feed-forward has alpha too."""

    def alpha_at(self, sublayer):
        return self.alpha if sublayer else 1.0


class FirstBlockWithoutOuterNorms(KEEL):
    """As some public ports have it."""

    def outer_norm(self, sublayer):
        return super().outer_norm(sublayer) if sublayer > 1 else None


class AttentionScaledAlone(LNS):
    """The feed-forward's norm is not scaled."""

    def read(self, state, *, sublayer):
        x, scale = super().read(state, sublayer=sublayer)
        return x, 1.0 if sublayer % 2 else scale


class ScaledBySublayer(LNS):
    """The scale counts sublayers."""

    def read(self, state, *, sublayer):
        return super().read(state, sublayer=sublayer)[0], (sublayer + 1) ** -0.5


class WithoutBeta(DeepNorm):
    """Every matrix starts with the same spread."""

    def build_sublayer(self, config, *, sublayer):
        built = SingleStream.build_sublayer(self, config, sublayer=sublayer)
        built.norm = None
        return built


class AlphaCountsSublayers(DeepNorm):
    """(2L)^(1/4) with L taken for the number of sublayers."""

    def alpha_at(self, sublayer):
        return self.alpha * 2**0.25


class NormedAfterTheAddition(SandwichLN):
    """The sum is normed, not the branch alone."""

    def write(self, state, carry, branch_out, emitted, *, sublayer):
        after = super().write(state, carry, branch_out, emitted, sublayer=sublayer)
        return after._replace(x=torch.nn.functional.rms_norm(after.x, after.x.shape[-1:]))


def without_output_mix(design):
    """The newest source is decoded."""

    class NewestDecoded(design):
        def readout(self, state, *, block):
            return state.newest

    return NewestDecoded


class SourcesAveraged(FullAttnRes):
    """All sources weigh the same, as they do at the start."""

    def mix(self, state, *, sublayer):
        return sum(state.slots) / len(state.slots)


def without_key_norm(design):
    """The logits grow with the sources."""

    class KeysAsTheyAre(design):
        def mix(self, state, *, sublayer):
            if sublayer == 0:
                return state.newest
            slots = torch.stack(state.slots)
            shares = (slots @ (self.queries[sublayer - 1] * self.key_norms[sublayer - 1])).softmax(0)
            return (shares.unsqueeze(-1) * slots).sum(0)

    return KeysAsTheyAre


class GroupsOffByOne(BlockAttnRes):
    """The first group ends after one sublayer, and every other begins one late."""

    def _boundary(self, sublayer):
        return super()._boundary(sublayer - 1)


class RunningSumLeftOut(BlockAttnRes):
    """Only closed groups are read."""

    def mix(self, state, *, sublayer):
        return super().mix(state._replace(running=None), sublayer=sublayer)


class DepthLeftOut(MoDA):
    """Attention reads the sequence alone."""

    def read(self, state, *, sublayer):
        return super().read(state._replace(keys=(), values=()), sublayer=sublayer)


class OwnWriteReadToo(MoDA):
    """The block's own key and value of the token are among the depth entries, besides the sequence's."""

    class Attention(moda.DepthSublayer):
        def forward(self, branch_in, carry, rotation):
            _, _, value, key = self.project(branch_in, rotation)
            return super().forward(branch_in, carry.write(key, value), rotation)

    def build_sublayer(self, config, *, sublayer):
        built = super().build_sublayer(config, sublayer=sublayer)
        return built if sublayer % 2 else self.Attention(built.norm, built.core, self.rotate_depth_keys)


class AlwaysRotated(MoDA):
    """Depth keys are rotated, without having been asked to."""

    def __init__(self, config, *, rotate_depth_keys=True):
        super().__init__(config, rotate_depth_keys=rotate_depth_keys)


class FeedForwardKeysUnnormed(MoDA):
    """The K-norm, where there is one, is for attention's keys alone."""

    def build_sublayer(self, config, *, sublayer):
        built = super().build_sublayer(config, sublayer=sublayer)
        self.key_norms = dict.fromkeys(self.key_norms)
        return built


@contextmanager
def rows_first(design):
    """The columns of H_res are exact instead of its rows."""
    with pytest.MonkeyPatch.context() as patch:
        sinkhorn = mhc.sinkhorn
        patch.setattr(mhc, "sinkhorn", lambda logits, iterations: sinkhorn(logits.mT, iterations).mT)
        yield design


BETA = 16**-0.25  # of two blocks
SCALED = dict.fromkeys(("v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), BETA)


def oracle(name, shape=GROUPED, **options):
    return partial(equals_oracle, name=name, shape=shape, length=3, batch=1, **options)


@pytest.mark.parametrize(
    ("design", "broken", "check"),
    [
        (HC, ResidualsUnmixed, oracle("hc")),
        (HC, ResidualsUnmixed, oracle("hc", dynamic=False)),
        (HC, ResidualsMixedTransposed, oracle("hc")),
        (HC, ResidualsMixedTransposed, oracle("hc", dynamic=False)),
        (HC, OldStreamsReadAfterMixing, oracle("hc")),
        (HC, without_final_norm(HC), oracle("hc")),
        (HC, without_final_norm(HC), starts_as_pre_ln),
        (MHC, StreamsExchangedTransposed, oracle("mhc", iterations=2)),
        (MHC, OutputsHalved, starts_as_pre_ln),
        (MHC, OutputsHalved, oracle("mhc", iterations=2)),
        (FullAttnRes, SourcesAveraged, oracle("full_attnres")),
        (FullAttnRes, without_output_mix(FullAttnRes), oracle("full_attnres")),
        (FullAttnRes, without_output_mix(FullAttnRes), starts_as_pre_ln),
        (FullAttnRes, without_key_norm(FullAttnRes), oracle("full_attnres")),
        (BlockAttnRes, without_output_mix(BlockAttnRes), oracle("block_attnres", THREE, group_size=3)),
        (BlockAttnRes, without_output_mix(BlockAttnRes), starts_as_pre_ln),
        (BlockAttnRes, without_key_norm(BlockAttnRes), oracle("block_attnres", THREE, group_size=2)),
        (BlockAttnRes, GroupsOffByOne, oracle("block_attnres", THREE, group_size=2)),
        (BlockAttnRes, GroupsOffByOne, oracle("block_attnres", THREE, group_size=3)),
        (BlockAttnRes, RunningSumLeftOut, oracle("block_attnres", THREE, group_size=3)),
        (BlockAttnRes, without_final_norm(BlockAttnRes), oracle("block_attnres", THREE, group_size=2)),
        (MoDA, DepthLeftOut, oracle("moda")),
        (MoDA, OwnWriteReadToo, oracle("moda")),
        (MoDA, AlwaysRotated, oracle("moda")),
        (MoDA, FeedForwardKeysUnnormed, oracle("moda", GROUPED | {"qk_norm": True})),
        (KEEL, AlphaFromTheStart, oracle("keel")),
        (KEEL, FirstBlockWithoutOuterNorms, oracle("keel")),
        (LNS, AttentionScaledAlone, oracle("lns")),
        (LNS, ScaledBySublayer, oracle("lns")),
        (DeepNorm, WithoutBeta, partial(starts_with_scaled_matrices, factors=SCALED)),
        (DeepNorm, AlphaCountsSublayers, oracle("deepnorm")),
        (SandwichLN, NormedAfterTheAddition, oracle("sandwich_ln")),
    ],
)
def test_a_broken_copy_fails_where_the_design_passes(design, broken, check):
    check(design)
    with pytest.raises(AssertionError, match="off by"):
        check(broken)


def test_sinkhorn_with_the_rows_first_fails_too():
    check = oracle("mhc", iterations=2)
    check(MHC)
    with rows_first(MHC) as broken, pytest.raises(AssertionError, match="off by"):
        check(broken)
