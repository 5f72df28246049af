"""What holds a design, one function each, shared by the tests of the designs and the tests of broken copies of them."""

from __future__ import annotations

from functools import partial
from importlib import import_module

import torch

from depthbench import build_model
from tests.oracles.compare import assert_equals_oracle, assert_near, gradients, randomise, some_tokens

GROUPED = dict(n_layer=2, d_model=16, n_head=4, n_kv_head=2, vocab_size=11, d_ff=21)
UNGROUPED = dict(n_layer=2, d_model=18, n_head=3, vocab_size=11, d_ff=27)


def oracle_of(name):
    return import_module(f"tests.oracles.{name}").logits


def equals_oracle(design, name, shape=GROUPED, length=5, batch=2, **options):
    """In fp64, with no parameter at its initial value, the logits and every gradient are those of the oracle ``name``."""
    model = randomise(build_model(design, **shape, **options).double())
    assert_equals_oracle(model, partial(oracle_of(name), **options), 1e-11, some_tokens(model, batch, length))


@torch.no_grad()
def equals_oracle_without_a_block(design, name, block, rule, shape=GROUPED, **options):
    """And so are the logits with ``block`` skipped by ``rule``."""
    model = randomise(build_model(design, **shape, **options).double())
    tokens = some_tokens(model, batch=1, length=4)
    state = model.residual.skip(model.run(model.embed(tokens), 0, block), block=block, rule=rule)
    actual = model.logits(model.run(state, block + 1))
    expected = oracle_of(name)(dict(model.named_parameters()), tokens, model.config, skip=block, rule=rule, **options)
    assert_near(actual, expected, 1e-11, f"logits without block {block}")


def starts_as_pre_ln(design, **options):
    """Whatever the weights shared with Pre-LN are: with its own at their initial values a design gives Pre-LN's logits and gradients."""
    shape = GROUPED | dict(n_layer=3, norm_eps=1e-24)
    plain = randomise(build_model("pre_ln", **shape).double())
    model = build_model(design, **shape, **options).double()
    model.load_state_dict(plain.state_dict(), strict=False)
    theirs = dict(plain.named_parameters())
    mine = {name: parameter for name, parameter in model.named_parameters() if name in theirs}
    tokens = some_tokens(model)
    actual, expected = model(tokens), plain(tokens)
    assert_near(actual, expected, 1e-12)
    mine, theirs = gradients(actual, mine), gradients(expected, theirs)
    for name in theirs:
        assert_near(mine[name], theirs[name], 1e-12, f"gradient of {name}")


def starts_with_scaled_matrices(design, factors):
    """Every matrix starts as Pre-LN's of the same seed, times the factor that its projection has in ``factors``, 1 where it has none."""
    torch.manual_seed(0)
    plain = build_model("pre_ln", **GROUPED).state_dict()
    torch.manual_seed(0)
    model = build_model(design, **GROUPED).state_dict()
    for name, weight in plain.items():
        if weight.ndim == 2:
            factor = factors.get(name.split(".")[-2], 1)
            assert_near(model[name] / weight.norm(), factor * weight / weight.norm(), 1e-6, name)
