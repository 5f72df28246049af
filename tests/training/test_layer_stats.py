"""Layer statistics against plain autograd on a model walked by hand, and their independence of micro-batches."""

import gc
import weakref

import lightning as L
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from depthbench import build_model, recipes
from depthbench.training.layer_stats import LayerStatistics
from depthbench.training.module import LanguageModelingModule
from depthbench.training.skip_ablation import skip_deltas
from tests.naive.full_attnres import NaiveFullAttnRes
from tests.naive.moda import NaiveMoDA

LAYERS, VOCAB, T = 3, 40, 8


@pytest.fixture
def model():
    torch.manual_seed(0)
    return build_model("pre_ln", n_layer=LAYERS, d_model=16, n_head=2, vocab_size=VOCAB)


@pytest.fixture
def blocks():
    return torch.randint(0, VOCAB, (8, T + 1), generator=torch.Generator().manual_seed(1))


def record(model, blocks, *, micro_batch, steps=1, every=1):
    """Rows of a real Lightning run over ``blocks``, all of which make one optimizer step."""
    rows = []
    statistics = LayerStatistics(lambda table, new: rows.extend(new), every_n_steps=every, tokens_per_step=64, last_step=steps)
    accumulation = len(blocks) // micro_batch
    trainer = L.Trainer(
        accelerator="cpu", max_steps=steps, accumulate_grad_batches=accumulation, callbacks=[statistics],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = LanguageModelingModule(model, recipe=recipes.recipe(), lr=1e-2, total_steps=10)
    trainer.fit(module, DataLoader(blocks.repeat(steps, 1), batch_size=micro_batch))
    return {(r["step"], r["layer"], r["site"], r["direction"], r["metric"]): r["value"] for r in rows}


def by_hand(model, blocks):
    """{(layer, site): tensor} with gradients of the mean loss, by walking the Pre-LN equations."""
    from depthbench.nn.rotary import rotation_for

    x = model.embedding(blocks[:, :-1])
    seen, states = {}, [x]
    for layer, block in enumerate(model.blocks):
        for site, sublayer in (("attn_branch", block.attention), ("ffn_branch", block.feed_forward)):
            branch, _ = sublayer(x, None, rotation_for(x, model.config.head_dim))
            branch.retain_grad()
            seen[layer, site] = branch
            x = x + branch
        x.retain_grad()
        seen[layer, "block_out"] = x
        states.append(x)
    logits = model.head(model.final_norm(x))
    F.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten()).backward()
    return seen, states


def test_every_value_against_autograd(model, blocks):
    seen, states = by_hand(model, blocks)
    expected = {}
    for (layer, site), value in seen.items():
        for direction, tensor in (("forward", value.detach()), ("backward", value.grad)):
            expected[1, layer, site, direction, "mean"] = tensor.mean().item()
            expected[1, layer, site, direction, "variance"] = tensor.var(correction=0).item()
            expected[1, layer, site, direction, "magnitude"] = tensor.abs().mean().item()
            expected[1, layer, site, direction, "norm"] = tensor.norm().item()
    for layer in range(LAYERS):
        before, after = states[layer].detach(), states[layer + 1].detach()
        expected[1, layer, "block_out", "forward", "residual_norm"] = (after.norm(dim=-1) / 4).mean().item()
        expected[1, layer, "block_out", "forward", "cosine_drift"] = (1 - F.cosine_similarity(before, after, dim=-1)).mean().item()
    recorded = record(model, blocks, micro_batch=8)
    assert recorded.keys() == expected.keys()
    for key, value in expected.items():
        assert recorded[key] == pytest.approx(value, rel=1e-4, abs=1e-9), key


@pytest.mark.parametrize("design", [NaiveFullAttnRes, NaiveMoDA])
def test_designs_whose_state_is_no_single_tensor(design, blocks):
    model = build_model(design, n_layer=LAYERS, d_model=16, n_head=2, vocab_size=VOCAB)
    recorded = record(model, blocks, micro_batch=4)
    for layer in range(LAYERS):
        for site in ("block_out", "attn_branch", "ffn_branch"):
            for direction in ("forward", "backward"):
                assert recorded[1, layer, site, direction, "norm"] > 0


def test_micro_batches_do_not_change_the_statistics(blocks):
    def fresh():
        torch.manual_seed(0)
        return build_model("pre_ln", n_layer=LAYERS, d_model=16, n_head=2, vocab_size=VOCAB)

    whole, split = record(fresh(), blocks, micro_batch=8), record(fresh(), blocks, micro_batch=2)
    assert whole.keys() == split.keys()
    for key, value in whole.items():
        assert split[key] == pytest.approx(value, rel=1e-4, abs=1e-9), key


def test_nothing_of_a_sampled_step_outlives_it(model, blocks):
    seen = []
    with model.taps(lambda name, sublayer, value: seen.append(weakref.ref(value)) if name == "branch_out" else None):
        record(model, blocks, micro_batch=4, steps=2)
    gc.collect()
    assert len(seen) == 2 * 2 * 2 * LAYERS and not any(branch() is not None for branch in seen)


def test_only_sampled_steps_are_recorded_and_nothing_else_is_attached(model, blocks, monkeypatch):
    attached = []
    taps = type(model).taps
    monkeypatch.setattr(type(model), "taps", lambda self, tap: attached.append(1) or taps(self, tap))
    recorded = record(model, blocks, micro_batch=4, steps=5, every=3)
    assert {key[0] for key in recorded} == {1, 3, 5}
    assert len(attached) == 3 * 2  # two micro-batches a step
    assert not model._taps


def test_skip_deltas_leave_one_block_out_at_a_time(model, blocks):
    def loss(skipped):
        x = model.embed(blocks[:, :-1])
        for layer in range(LAYERS):
            x = x if layer == skipped else model.run(x, layer, layer + 1)
        return F.cross_entropy(model.logits(x).flatten(0, 1), blocks[:, 1:].flatten()).item()

    with torch.no_grad():
        expected = [loss(layer) - loss(None) for layer in range(LAYERS)]
    assert any(abs(delta) > 1e-4 for delta in expected)
    assert skip_deltas(model, blocks) == pytest.approx(expected, abs=1e-6)
