"""Token collapse: ranks known beforehand, the singular value decomposition they stand for, windows without any rank."""

from __future__ import annotations

import pytest
import torch

from depthbench.probes.collapse import collapse
from tests.probes import crafted
from tests.probes.crafted import Vanishes, every_design, every_design_in_use, model_of, some_windows, values_of

METRICS = ("stable_rank", "effective_rank", "nuclear_ratio")
ROWS = dict.fromkeys(METRICS, 4)


@pytest.mark.parametrize("length", [5, 40], ids=["wide", "tall"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_in_one_direction_have_rank_1(length, dtype):
    generator = torch.Generator().manual_seed(0)
    lengths = 2.0 ** torch.randint(-3, 4, (29, 1), generator=generator)  # exact in any precision
    model = crafted.with_embedding(model_of(dtype=dtype), lengths * torch.randn(16, generator=generator))
    frame = collapse(crafted.with_idle_blocks(model), some_windows(length=length))
    for metric in METRICS:
        assert values_of(frame, metric) == pytest.approx(dict.fromkeys(range(4), 1.0), abs=1e-6), metric


def test_orthogonal_tokens_have_as_many_ranks_as_there_are():
    """Three tokens once, three and four times: squared singular values 1, 9 and 16."""
    model = crafted.with_embedding(model_of(d_model=32), torch.eye(32)[:29] * torch.tensor([1.0, 3.0, 4.0]).repeat(10)[:29, None])
    frame = collapse(crafted.with_idle_blocks(model), torch.tensor([[0, 1, 2, 5]]))
    shares = torch.tensor([1.0, 9.0, 16.0], dtype=torch.float64) / 26
    assert values_of(frame, "stable_rank") == pytest.approx(dict.fromkeys(range(4), 26 / 16), rel=1e-12)
    assert values_of(frame, "effective_rank") == pytest.approx(dict.fromkeys(range(4), (-shares @ shares.log()).exp().item()), rel=1e-12)
    assert values_of(frame, "nuclear_ratio") == pytest.approx(dict.fromkeys(range(4), 8 / 26**0.5), rel=1e-12)


@every_design
@pytest.mark.parametrize("length", [7, 70], ids=["wide", "tall"])
def test_equals_singular_values_window_by_window(design, length):
    model, windows = model_of(design, dtype=torch.float64), some_windows(length=length)
    states = crafted.states_of(model, windows)
    frame = collapse(model, windows)
    crafted.assert_every_value_is_finite(frame, ROWS)
    for block, vectors in enumerate(states):
        matrices = torch.stack(vectors).unflatten(0, (len(windows), length))
        expected = torch.tensor([ranks(matrix) for matrix in matrices]).mean(0).tolist()
        assert [values_of(frame, metric)[block] for metric in METRICS] == pytest.approx(expected, rel=1e-6)


def ranks(matrix_TW) -> list[float]:
    s = torch.linalg.svdvals(matrix_TW).tolist()
    total = sum(x * x for x in s)
    shares = torch.tensor([x * x / total for x in s if x > 1e-12 * s[0]])
    return [total / max(s) ** 2, (-shares * shares.log()).sum().exp().item(), sum(s) / total**0.5]


def test_windows_of_zeros_are_counted_and_left_out():
    rows = torch.randn(29, 16, generator=torch.Generator().manual_seed(0))
    rows[:, 0] = torch.tensor([-1.0, 1.0]).repeat(15)[:29]
    odd, even = 2 * some_windows(vocabulary=14) + 1, 2 * some_windows(vocabulary=14)
    model = crafted.with_embedding(model_of(Vanishes), rows)
    frame = collapse(model, torch.cat([odd, even[:2]]))
    assert values_of(frame, "zero_windows") == {1: 2, 2: 2, 3: 2}
    expected = collapse(model, odd)
    for metric in METRICS:
        assert values_of(frame, metric)[1] == pytest.approx(values_of(expected, metric)[1], rel=1e-12), metric
    assert collapse(model, even).value[3:12].isna().all()


def test_a_state_that_is_not_finite_gives_nan():
    model = model_of()
    with torch.no_grad():
        model.blocks[1].feed_forward.core.down_proj.weight[0, 0] = torch.nan
    found = values_of(collapse(model, some_windows()), "stable_rank")
    assert {block: value == value for block, value in found.items()} == {0: True, 1: True, 2: False, 3: False}


@every_design_in_use
def test_bf16_weights_give_no_nan(design):
    crafted.assert_every_value_is_finite(collapse(model_of(design, dtype=torch.bfloat16), some_windows()), ROWS)


@every_design_in_use
def test_batches_and_order_change_nothing(design):
    crafted.assert_same_whatever_the_batch(collapse, model_of(design))
