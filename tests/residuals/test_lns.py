"""LayerNorm Scaling is Pre-LN with the gains of block b divided by sqrt(b + 1)."""

from __future__ import annotations

import math

import torch

from depthbench import build_model
from tests.oracles.compare import assert_near, gradients, randomise, some_tokens

SMALL = dict(n_layer=3, d_model=16, n_head=4, n_kv_head=2, vocab_size=13, d_ff=24)


def same_weights(**changes):
    lns, pre_ln = (randomise(build_model(design, **SMALL | changes).double()) for design in ("lns", "pre_ln"))
    pre_ln.load_state_dict(lns.state_dict())
    return lns, pre_ln


def pair(**changes):
    """LNS at random weights, and Pre-LN with its gains divided: the models, and the divisor of each parameter."""
    lns, pre_ln = same_weights(**changes)
    divisors = {name: 1.0 for name, _ in pre_ln.named_parameters()}
    with torch.no_grad():
        for number, block in enumerate(pre_ln.blocks):
            for kind in ("attention", "feed_forward"):
                getattr(block, kind).norm.weight /= math.sqrt(number + 1)
                divisors[f"blocks.{number}.{kind}.norm.weight"] = math.sqrt(number + 1)
    return lns, pre_ln, divisors


def test_equals_pre_ln_with_divided_gains():
    lns, pre_ln, divisors = pair(norm_eps=1e-6)
    tokens = some_tokens(lns)
    actual, expected = lns(tokens), pre_ln(tokens)
    assert_near(actual, expected, 1e-12)
    mine, theirs = (gradients(logits, dict(model.named_parameters())) for logits, model in ((actual, lns), (expected, pre_ln)))
    assert mine.keys() == theirs.keys()
    for name, gradient in mine.items():
        assert_near(gradient, theirs[name] / divisors[name], 1e-12, name)


def test_one_block_is_pre_ln():
    lns, pre_ln = same_weights(n_layer=1)
    assert_near(lns(some_tokens(lns)), pre_ln(some_tokens(lns)), 1e-15)


def test_the_scale_travels_with_its_block():
    lns, pre_ln, _ = pair()
    tokens = some_tokens(lns)
    before = lns(tokens)
    with lns.swapped(0, 2), pre_ln.swapped(0, 2):
        assert_near(lns(tokens), pre_ln(tokens), 1e-12)
        assert (lns(tokens) - before).abs().max() > 1e-3
    assert torch.equal(lns(tokens), before)
