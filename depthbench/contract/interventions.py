"""Looking in and stepping in: taps, blocks left out, blocks exchanged."""

from __future__ import annotations

from typing import Any

import torch

from depthbench.contract.subject import Subject, check, copied, fail, require, same, some_tokens
from depthbench.errors import UserError


@check
def taps_see_every_sublayer(subject: Subject) -> None:
    """Four values per sublayer, in order: the state before, what the branch reads, what it adds, the state after; (B, T, D) for the branch,
    the design's state otherwise. Every probe and layer statistic is made of these."""
    model, tokens = subject.fresh(), some_tokens()
    calls: list[tuple[str, int, Any]] = []
    with model.taps(lambda *call: calls.append(call)):
        model(tokens)
    model(tokens)
    names = ["state_in", "branch_in", "branch_out", "state_out"]
    expected = [(name, sublayer) for sublayer in range(model.config.n_sublayer) for name in names]
    require([(name, sublayer) for name, sublayer, _ in calls] == expected, f"{len(calls)} calls, not the {len(expected)} of a forward pass")
    state_type, width = type(model.embed(tokens)), model.config.d_model
    require(isinstance(model.embed(tokens), tuple), f"a state is a {state_type.__name__}, not a NamedTuple")
    for name, sublayer, value in calls:
        if name.startswith("state"):
            require(type(value) is state_type, f"{name} of sublayer {sublayer} is a {type(value).__name__}, not a {state_type.__name__}")
        else:
            require(value.shape == (2, 6, width), f"{name} of sublayer {sublayer} has shape {tuple(value.shape)}, not (2, 6, {width})")


@check
def skipping_a_block_follows_the_rules(subject: Subject) -> None:
    """A block left out changes what follows, stays finite and leaves what came before as it was, by every rule that ``skip_rules`` names;
    the first is the default, and an unknown one is refused in one line."""
    model, tokens = subject.moved(), some_tokens()
    skip, rules = model.residual.skip, model.residual.skip_rules
    expected, state = model(tokens), model.embed(tokens)
    for block in range(model.config.n_layer):
        before, outcomes = copied(state), {}
        for rule in rules:
            outcomes[rule] = skip(state, block=block, rule=rule)
            logits = model.logits(model.run(outcomes[rule], block + 1))
            change = (logits - expected).abs().max().item()
            require(logits.isfinite().all(), f"block {block} skipped by rule '{rule}': the logits are not finite")
            require(change > 1e-3, f"block {block} skipped by rule '{rule}': the logits change by {change:.1e} only")
        require(same(state, before), f"skipping block {block} changes the state before it")
        require(same(skip(state, block=block), outcomes[rules[0]]), f"skipping block {block} without a rule is not rule '{rules[0]}'")
        try:
            skip(state, block=block, rule="no such")
        except UserError:
            pass
        else:
            fail("skip accepts a rule 'no such': pass the rule through self.skip_rule(rule)")
        state = model.run(state, block, block + 1)


@check
def swapping_twice_is_the_identity(subject: Subject) -> None:
    """Two blocks that change places change the output; put back, every parameter and the output are as before, bit for bit."""
    model, tokens = subject.moved(), some_tokens()
    expected, parameters = model(tokens), {name: value.clone() for name, value in model.state_dict().items()}
    for first, second in ((0, 2), (1, 2)):
        with model.swapped(first, second):
            change = (model(tokens) - expected).abs().max().item()
        require(change > 1e-3, f"with blocks {first} and {second} exchanged the logits change by {change:.1e} only")
        differing = [name for name, value in model.state_dict().items() if not torch.equal(value, parameters[name])]
        require(not differing, f"blocks {first} and {second} exchanged and put back: {', '.join(differing[:4])} differ")
        require(torch.equal(model(tokens), expected), f"blocks {first} and {second} exchanged and put back: other logits, equal weights")
    with model.swapped(1, 1):
        require(torch.equal(model(tokens), expected), "a block exchanged with itself changes the logits")
