"""The function that a model of the design computes."""

from __future__ import annotations

from typing import Any

import torch

from depthbench.contract.subject import EXACT, SHAPE, Subject, check, fail, listed, require, some_tokens
from depthbench.residuals.base import State, map_tensors


@check
def is_causal(subject: Subject) -> None:
    """A token reaches itself and later ones only. A model that sees the token it must predict has a wonderful loss and learns nothing."""
    model, tokens, at = subject.moved(), some_tokens(length=7), 3
    other = tokens.clone()
    other[:, at] = (other[:, at] + 1) % SHAPE["vocab_size"]
    changed = (model(tokens) - model(other)).abs().amax(dim=(0, 2))
    reached = changed[:at].max().item()
    require(reached <= EXACT, f"another token at position {at} changes the logits at earlier positions, by up to {reached:.1e}")
    require(changed[at:].min() > 1e-6, f"another token at position {at} leaves the logits there or later as they were")


@check
def every_parameter_gets_a_gradient(subject: Subject) -> None:
    """A parameter without a gradient is counted against the budget and never learns; often it is a path that was forgotten."""
    model = subject.moved()
    model(some_tokens()).square().sum().backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.abs().max() > EXACT]
    require(not without, f"no gradient, or one of zero, away from the initial values: {listed(without)}")
    strange = [name for name, parameter in model.named_parameters() if not parameter.grad.isfinite().all()]
    require(not strange, f"a gradient that is not finite: {listed(strange)}")


@check
def every_parameter_is_in_the_graph_at_init(subject: Subject) -> None:
    """At the first step some gradients may be zero, but none may be missing: data parallelism would wait for it forever."""
    model = subject.fresh()
    model(some_tokens()).square().sum().backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    require(not without, f"not part of the graph of the first step: {listed(without)}")


@check
def the_state_is_carried_on(subject: Subject) -> None:
    """What a sublayer reads, and what its output is added to, must matter: a mixing that is forgotten (public code had one for a year) or a
    residual path that is dropped trains all the same, and is another design."""
    model, tokens = subject.moved(), some_tokens()
    expected, read, write = model(tokens), model.residual.read, model.residual.write

    def empty(state: State) -> State:
        return map_tensors(torch.zeros_like, state)

    def added_to_nothing(state: State, carry: Any, *branch: Any, sublayer: int) -> State:
        return write(empty(state), read(empty(state), sublayer=sublayer)[1], *branch, sublayer=sublayer)

    model.residual.read = lambda state, *, sublayer: read(empty(state), sublayer=sublayer)
    change = (model(tokens) - expected).abs().max().item()
    require(change > 1e-3, f"where sublayers read from a state of zeros, the logits change by {change:.1e} only")
    model.residual.read, model.residual.write = read, added_to_nothing
    change = (model(tokens) - expected).abs().max().item()
    require(change > 1e-3, f"where outputs are added to a state of zeros, the logits change by {change:.1e} only")


@check
def heads_may_be_shared_and_normed(subject: Subject) -> None:
    """Grouped queries (the largest sizes have them) and QK-norm (imported checkpoints may) are the backbone's, and work with any design."""
    for changes in (dict(n_kv_head=4), dict(n_kv_head=1), dict(qk_norm=True)):
        model, what = subject.moved(**changes), ", ".join(f"{name} {value}" for name, value in changes.items())
        logits = model(some_tokens())
        require(logits.shape == (2, 6, SHAPE["vocab_size"]) and logits.isfinite().all(), f"{what}: logits of shape {tuple(logits.shape)}")
        logits.square().sum().backward()
        without = [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.abs().max() > EXACT]
        require(not without, f"{what}: no gradient for {listed(without)}")


@check
def any_batch_and_length_work(subject: Subject) -> None:
    """One sequence, or one token, is what evaluation and generation ask for; each row of a batch is a sequence of its own."""
    model, tokens = subject.moved(), some_tokens(batch=3, length=5)
    expected = model(tokens)
    for what, rows, length in (("one sequence of the batch", 1, 5), ("the first token alone", 3, 1), ("one token of one sequence", 1, 1)):
        actual = model(tokens[:rows, :length])
        if actual.shape != (rows, length, SHAPE["vocab_size"]):
            fail(f"{what}: logits of shape {tuple(actual.shape)}")
        difference = (actual - expected[:rows, :length]).abs().max().item()
        require(difference <= 1e-11, f"{what}: logits off by {difference:.1e} from those inside the batch")
