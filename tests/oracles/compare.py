"""Holds a model against another function of the same weights: outputs and the gradients of every parameter."""

from __future__ import annotations

import torch


@torch.no_grad()
def randomise(model, seed=0, spread=0.3):
    """Moves every parameter away from its initial value, lest a path behind a zero stay untested; returns the model."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=spread)
    return model


def some_tokens(model, batch=2, length=6, seed=1):
    return torch.randint(model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def gradients(logits, parameters, seed=2):
    """Gradients of a fixed random combination of the logits, by name."""
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(logits.dtype)
    values = torch.autograd.grad((logits * direction).sum(), list(parameters.values()))
    return dict(zip(parameters, values, strict=True))


def assert_near(actual, expected, tolerance, what="outputs"):
    """The largest difference, over the largest expected value or 1, is within the tolerance."""
    difference = ((actual - expected).abs().max() / expected.abs().max().clamp(min=1)).item()
    assert difference <= tolerance, f"{what}: off by {difference:.1e}, tolerance {tolerance:.0e}"


def assert_equals_oracle(model, oracle, tolerance, tokens=None):
    """``oracle(weights, tokens, config)`` gives the same logits and the same gradient of every parameter."""
    tokens = some_tokens(model) if tokens is None else tokens
    parameters = dict(model.named_parameters())
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in parameters.items()}
    actual, expected = model(tokens), oracle(weights, tokens, model.config)
    assert_near(actual, expected, tolerance)
    mine, theirs = gradients(actual, parameters), gradients(expected, weights)
    for name in parameters:
        assert theirs[name].abs().max() > 0, f"{name} has no effect in the oracle: the comparison proves nothing"
        assert_near(mine[name], theirs[name], tolerance, f"gradient of {name}")
