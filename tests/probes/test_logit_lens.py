"""Logit lens: what is known of its last entry, the exits it stands for, one token at a time."""

from __future__ import annotations

import sys

import pytest
import torch

from depthbench.probes.logit_lens import logit_lens
from tests.probes import crafted
from tests.probes.crafted import every_design, every_design_in_use, model_of, some_windows, values_of

module = sys.modules["depthbench.probes.logit_lens"]  # the package shows the function under this name
METRICS = ("loss", "kl", "top5_overlap")
ROWS = dict.fromkeys(METRICS, 4)


@every_design
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_last_entry_is_the_model(design, dtype):
    model, windows = model_of(design, dtype=dtype), some_windows()
    frame = logit_lens(model, windows)
    crafted.assert_every_value_is_finite(frame, ROWS)
    assert values_of(frame, "loss")[3] == pytest.approx(loss_of(model, windows), abs=1e-6 if dtype == torch.float32 else 1e-2)
    assert values_of(frame, "kl")[3] == 0.0
    assert values_of(frame, "top5_overlap")[3] == 1.0


@torch.no_grad()
def loss_of(model, windows) -> float:
    return torch.nn.functional.cross_entropy(model(windows[:, :-1]).double().flatten(0, 1), windows[:, 1:].flatten()).item()


@every_design
def test_equals_exits_token_by_token(design, monkeypatch):
    """Five tokens at a time, which divides no window."""
    monkeypatch.setattr(module, "LOGITS", 0)
    monkeypatch.setattr(module, "ROWS", 5)
    model, windows = model_of(design, dtype=torch.float64), some_windows(windows=2)
    expected = [exits(model, window) for window in windows]
    frame = logit_lens(model, windows)
    for place, metric in enumerate(METRICS):
        by_block = {block: sum(of_window[block][place] for of_window in expected) / 2 for block in range(4)}
        assert values_of(frame, metric) == pytest.approx(by_block, abs=1e-12), metric
    assert set(frame.n_tokens) == {14}


@torch.no_grad()
def exits(model, window) -> list[list[float]]:
    """(loss, KL, overlap) per boundary, means over one window's tokens."""
    last = model(window[None, :-1])[0].softmax(-1)
    found = []
    for block in range(len(model.blocks) + 1):
        hidden = model.residual.close(model.run(model.embed(window[None, :-1]), 0, block), model.final_norm, block=block)
        sums = [0.0, 0.0, 0.0]
        for p, q, target in zip(last, model.head(hidden)[0].softmax(-1), window[1:], strict=True):
            common = set(p.argsort()[-5:].tolist()) & set(q.argsort()[-5:].tolist())
            for place, value in enumerate([-q[target].log(), sum(p * (p / q).log()), len(common) / 5]):
                sums[place] += float(value) / len(last)
        found.append(sums)
    return found


def test_identity_blocks_leave_nothing_to_add():
    frame = logit_lens(crafted.with_idle_blocks(model_of()), some_windows())
    assert values_of(frame, "kl") == dict.fromkeys(range(4), 0.0)
    assert values_of(frame, "top5_overlap") == dict.fromkeys(range(4), 1.0)
    assert len(set(values_of(frame, "loss").values())) == 1


@pytest.mark.parametrize("norm_then_sum", [False, True])
def test_hyper_connections_close_their_streams_as_the_model_does(norm_then_sum):
    """A model that ends at the boundary has the same final norm, head and reduction."""
    model, windows = model_of("hc", dtype=torch.float64, norm_then_sum=norm_then_sum), some_windows()
    short = model_of("hc", dtype=torch.float64, n_layer=2, norm_then_sum=norm_then_sum)
    short.load_state_dict({name: model.state_dict()[name] for name in short.state_dict()})
    assert values_of(logit_lens(model, windows), "loss")[2] == pytest.approx(loss_of(short, windows), abs=1e-12)


def test_a_vocabulary_of_three_has_a_top_three():
    frame = logit_lens(model_of(vocab_size=3), some_windows(vocabulary=3))
    assert values_of(frame, "top5_overlap") == dict.fromkeys(range(4), 1.0)


@every_design_in_use
def test_batches_and_order_change_nothing(design):
    crafted.assert_same_whatever_the_batch(logit_lens, model_of(design))
