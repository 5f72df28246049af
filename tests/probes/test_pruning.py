"""Layer-skip ablation: losses by the oracles, and blocks that can be missed."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from depthbench.errors import UserError
from depthbench.probes.pruning import pruning
from tests.oracles.checks import oracle_of
from tests.probes.crafted import (
    assert_every_value_is_finite,
    assert_same_whatever_the_batch,
    every_design,
    every_design_in_use,
    model_of,
    some_windows,
    values_of,
    with_idle_blocks,
)


def loss_of(logits, windows):
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()


@pytest.mark.parametrize("design", ["pre_ln", "lns", "moda"])
def test_identity_blocks_cost_nothing(design):
    deltas = values_of(pruning(with_idle_blocks(model_of(design)), some_windows()), "delta")
    assert deltas == dict.fromkeys(range(3), 0.0)


def test_a_model_that_knows_nothing_loses_nothing():
    model = model_of()
    torch.nn.init.zeros_(model.head.weight)
    frame = pruning(model, some_windows())
    assert values_of(frame, "delta") == dict.fromkeys(range(3), 0.0)
    assert frame.value[frame.metric == "loss"].item() == pytest.approx(torch.tensor(29.0).log().item())


@torch.no_grad()
@pytest.mark.parametrize(
    ("design", "options"),
    [
        *(("block_attnres", dict(group_size=size)) for size in (1, 3, 4)),
        ("full_attnres", {}),
        ("moda", {}),
        ("moda", dict(rotate_depth_keys=True)),
    ],
    ids=str,
)
def test_designs_with_two_rules_by_their_oracles(design, options):
    """Four blocks. In groups of four sublayers, blocks 0 and 2 open a group and stay inside it, 1 and 3 stand before a boundary and the
    readout; in groups of three there is a boundary inside blocks 1 and 3, before block 3 none."""
    model, windows = model_of(design, dtype=torch.float64, n_layer=4, **options), some_windows(windows=1, length=4)
    weights, oracle = dict(model.named_parameters()), oracle_of(design)
    whole = loss_of(oracle(weights, windows[:, :-1], model.config, **options), windows)
    found = []
    for rule in model.residual.skip_rules:
        frame = pruning(model, windows, rule=rule)
        assert set(frame.rule) == {rule}
        assert frame.value[frame.metric == "loss"].item() == pytest.approx(whole, abs=1e-6)
        for block, delta in values_of(frame, "delta").items():
            without = loss_of(oracle(weights, windows[:, :-1], model.config, skip=block, rule=rule, **options), windows)
            assert delta == pytest.approx(without - whole, abs=1e-6), (rule, block)
        found.append(values_of(frame, "delta"))
    differing = [block for block in range(3) if abs(found[0][block] - found[1][block]) > 1e-4]
    assert differing  # the rules are two


@torch.no_grad()
@every_design
def test_every_design_by_whole_passes(design):
    model, windows = model_of(design, dtype=torch.float64), some_windows()
    for rule in model.residual.skip_rules:
        deltas = values_of(pruning(model, windows, rule=rule), "delta")
        for block, delta in deltas.items():
            with model.skipped(block, rule):
                without = loss_of(model(windows[:, :-1]), windows)
            assert delta == pytest.approx(without - loss_of(model(windows[:, :-1]), windows), abs=1e-6)
        assert sorted(deltas) == [0, 1, 2] and min(map(abs, deltas.values())) > 1e-4


def test_an_unknown_rule_is_refused():
    with pytest.raises(UserError, match="unknown skip rule 'renormalise'; known: identity"):
        pruning(model_of(), some_windows(), rule="renormalise")


@every_design_in_use
def test_batch_size_and_order_change_nothing(design):
    assert_same_whatever_the_batch(pruning, model_of(design))


@every_design_in_use
def test_bf16_weights_give_numbers(design):
    assert_every_value_is_finite(pruning(model_of(design, dtype=torch.bfloat16), some_windows()), {"delta": 3, "loss": 1})


def test_progress_ends_at_1():
    told = []
    pruning(model_of(), some_windows(windows=3), micro_batch=2, progress=told.append)
    assert told == sorted(told) and told[-1] == 1 and len(told) == 2 * 4
