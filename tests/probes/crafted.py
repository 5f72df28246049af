"""Models whose probes are known beforehand, and what the tests of depth-state probes share."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from torch import Tensor

from depthbench import build_model, residuals
from depthbench.nn.model import LanguageModel
from depthbench.residuals.base import SingleStream, Stream
from tests import naive
from tests.contract.external import TwoLanes
from tests.oracles.compare import randomise

SHAPE = dict(n_layer=3, d_model=16, n_head=4, n_kv_head=2, vocab_size=29, d_ff=24)
NAIVE = naive.forms()
IN_USE = [*residuals.names(), TwoLanes]


def label(design) -> str:
    return design if isinstance(design, str) else design.__name__


every_design = pytest.mark.parametrize("design", [*IN_USE, *NAIVE], ids=label)
every_design_in_use = pytest.mark.parametrize("design", IN_USE, ids=label)


class AfterEachBlock(SingleStream):
    """A design whose blocks do nothing but ``turn`` the stream."""

    def turn(self, x_BTD: Tensor) -> Tensor:
        raise NotImplementedError

    def write(self, state, carry, branch_out, emitted, *, sublayer):
        return Stream(self.turn(state.x)) if sublayer % 2 else state


class Flips(AfterEachBlock):
    def turn(self, x_BTD):
        return -x_BTD


class Shifts(AfterEachBlock):
    """Along the width by one: a one-hot stream becomes orthogonal to what it was."""

    def turn(self, x_BTD):
        return x_BTD.roll(1, -1)


class Doubles(AfterEachBlock):
    def turn(self, x_BTD):
        return 2 * x_BTD


class Vanishes(AfterEachBlock):
    """Tokens whose first channel is negative become zero."""

    def turn(self, x_BTD):
        return x_BTD * (x_BTD[..., :1] >= 0)


def model_of(design="pre_ln", *, dtype: torch.dtype = torch.float32, **changes) -> LanguageModel:
    """A small model none of whose parameters has its initial value, always the same one."""
    torch.manual_seed(3)
    return randomise(build_model(design, **SHAPE | changes)).to(dtype)


@torch.no_grad()
def with_embedding(model: LanguageModel, rows: Tensor) -> LanguageModel:
    """The model with ``rows`` (V, D), or one row for all tokens, as its embedding."""
    model.embedding.weight.copy_(rows)
    return model


@torch.no_grad()
def with_idle_blocks(model: LanguageModel) -> LanguageModel:
    """The model with every output projection 0: a Pre-LN block is then the identity."""
    for block in model.blocks:
        block.attention.core.o_proj.weight.zero_()
        block.feed_forward.core.down_proj.weight.zero_()
    return model


def some_windows(windows: int = 3, length: int = 7, vocabulary: int = SHAPE["vocab_size"]) -> Tensor:
    return torch.randint(vocabulary, (windows, length + 1), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def states_of(model: LanguageModel, windows: Tensor) -> list[list[Tensor]]:
    """z_l as lists of the tokens' vectors, in fp64: a run of its own for every window and boundary."""
    found = []
    for block in range(len(model.blocks) + 1):
        states = (model.run(model.embed(window[None, :-1]), 0, block) for window in windows)
        found.append([z for state in states for z in model.residual.depth_state(state, block=block)[0].double()])
    return found


def values_of(frame: pd.DataFrame, metric: str) -> dict:
    """A metric's values by (i, j), or by i where that is all."""
    rows = frame[frame.metric == metric]
    keys = rows.i if rows.j.isna().all() else zip(rows.i, rows.j, strict=True)
    return dict(zip(keys, rows.value, strict=True))


def assert_same_whatever_the_batch(probe, model: LanguageModel) -> None:
    """Batches of 1, 3 and 8 windows, and the windows in another order, give the same rows."""
    windows = some_windows(windows=8)
    expected = probe(model, windows)
    for order, micro_batch in ((slice(None), 1), (slice(None), 3), (torch.randperm(8, generator=torch.Generator().manual_seed(0)), 3)):
        found = probe(model, windows[order], micro_batch=micro_batch)
        pd.testing.assert_frame_equal(found.drop(columns="value"), expected.drop(columns="value"))
        assert (found.value - expected.value).abs().max() <= 1e-6


def assert_every_value_is_finite(frame: pd.DataFrame, metrics: dict[str, int]) -> None:
    """The frame has exactly so many rows of each metric, all finite and stored as such."""
    assert frame.metric.value_counts().to_dict() == metrics
    assert torch.tensor(frame.value.tolist()).isfinite().all()
    assert set(frame.status) == {"ok"}
