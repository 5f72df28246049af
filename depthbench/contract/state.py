"""The state between blocks is a value: a run may start from any boundary, again and again, and nothing changes what a state means."""

from __future__ import annotations

import torch

from depthbench.contract.subject import (
    EXACT,
    Subject,
    check,
    combined,
    copied,
    gradients,
    require,
    require_near,
    same,
    some_tokens,
    tensors_of,
)
from depthbench.residuals.base import State, map_tensors


@check
def a_run_restarts_at_every_boundary(subject: Subject) -> None:
    """Probes run the blocks after a boundary many times from one stored state; each time the result must be the full run's."""
    model, tokens = subject.moved(), some_tokens()
    expected = model(tokens)
    for block in range(model.config.n_layer + 1):
        state = model.run(model.embed(tokens), 0, block)
        for attempt in ("", ", the second time from the same state"):
            require_near(model.logits(model.run(state, block)), expected, EXACT, f"restarted before block {block}{attempt}")
        with torch.inference_mode():  # of what is made there, nothing may be written to outside
            state = model.run(model.embed(tokens), 0, block)
        with torch.no_grad():
            require_near(model.logits(model.run(state, block)), expected, EXACT, f"restarted outside inference mode before block {block}")
            require_near(model.logits(model.run(model.embed(tokens))), expected, EXACT, "after a run in inference mode")


@check
def a_run_restarts_after_later_blocks_changed_places(subject: Subject) -> None:
    """A state holds only what earlier sublayers produced. What is made ahead from later weights is a cache that ``begin`` rebuilds: else
    a stored prefix answers with the weights from before a swap."""
    model, tokens = subject.moved(), some_tokens()
    prefix = model.run(model.embed(tokens), 0, 1)
    with model.swapped(1, 2):
        require_near(model.logits(model.run(prefix, 1)), model(tokens), EXACT, "restarted before block 1, with blocks 1 and 2 swapped")
    require_near(model.logits(model.run(prefix, 1)), model(tokens), EXACT, "restarted before block 1, after the blocks were put back")


@check
def states_are_never_changed(subject: Subject) -> None:
    """No method may write into a state that it was given: ``read``, ``write``, ``skip``, ``close`` and the questions that probes ask."""
    model = subject.moved()
    residual, last = model.residual, model.config.n_layer
    seen: list[tuple[str, State, State]] = []
    branches: dict[int, torch.Tensor] = {}

    def keep(name: str, sublayer: int, value: State) -> None:
        if name == "branch_out":
            branches.setdefault(sublayer, value)
        if name.startswith("state"):
            seen.append((f"{name} of sublayer {sublayer}", value, copied(value)))

    with torch.no_grad():
        opened = model.embed(some_tokens())
        seen.append(("the opened state", opened, copied(opened)))
        with model.taps(keep):
            closed = model.run(opened)
            model.hidden(closed)
            begun = model.run(opened, 0, 1)
            for rule in residual.skip_rules:
                model.run(residual.skip(begun, block=1, rule=rule), 2)
        for state, block in ((opened, 0), (begun, 1), (closed, last)):
            residual.depth_state(state, block=block)
            residual.readout(state, block=block)
            residual.linear(state, sublayer=2 * block, branch_out=branches.get(2 * block))
    changed = [what for what, value, copy in seen if not same(value, copy)]
    require(not changed, f"changed after it was handed over: {', '.join(changed[:3])}")


@check
def two_runs_from_one_state_keep_apart(subject: Subject) -> None:
    """From one state two runs may go on in turn, sublayer by sublayer: a buffer that both would write to is shared by mistake."""
    model, tokens = subject.moved(), some_tokens()
    expected = model(tokens)
    expected_of_other = model.logits(model.run(model.residual.skip(model.run(model.embed(tokens), 0, 1), block=1), 2))
    prefix = model.run(model.embed(tokens), 0, 1)
    other: list[State] = []
    turns = {  # after which sublayer of the one run the other does what: it skips block 1 and runs block 2
        2: lambda: other.append(model.residual.skip(prefix, block=1)),
        3: lambda: other.append(model.run(other[-1], 2)),
    }

    def take_turns(name: str, sublayer: int, value: State) -> None:
        if name == "state_out" and sublayer in turns:
            turns.pop(sublayer)()

    with model.taps(take_turns):
        actual = model.logits(model.run(prefix, 1))
    actual_of_other = model.logits(other[-1])
    require_near(actual, expected, EXACT, "logits of a run beside which another went on from the same state")
    require_near(actual_of_other, expected_of_other, EXACT, "logits of the other run, which skips block 1")
    expected_gradients = gradients(model, expected + expected_of_other)
    for name, gradient in gradients(model, actual + actual_of_other).items():
        require_near(gradient, expected_gradients[name], EXACT, f"gradient of {name} from both runs")


@check
def gradients_pass_every_boundary(subject: Subject) -> None:
    """Cut at a boundary, backpropagation gives the same gradients: those on the state's tensors are all that the blocks before it need.
    Jacobians are taken so, from a stored state through one block."""
    model, tokens = subject.moved(), some_tokens()
    names, parameters = zip(*model.named_parameters(), strict=True)
    expected = gradients(model, model(tokens))
    for block in range(model.config.n_layer + 1):
        state = model.run(model.embed(tokens), 0, block)
        cut = map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), state)
        attached = [(tensor, leaf) for tensor, leaf in zip(tensors_of(state), tensors_of(cut), strict=True) if leaf.requires_grad]
        leaves = [leaf for _, leaf in attached]
        loss = combined(model.logits(model.run(cut, block)))
        later = torch.autograd.grad(loss, (*leaves, *parameters), allow_unused=True)
        reached = [(tensor, on_it) for (tensor, _), on_it in zip(attached, later, strict=False) if on_it is not None]
        require(reached, f"after block {block} no tensor of the state gets a gradient")
        tensors, on_tensors = zip(*reached, strict=True)
        earlier = torch.autograd.grad(tensors, parameters, on_tensors, allow_unused=True)
        for name, before, after in zip(names, earlier, later[len(leaves) :], strict=True):
            found = sum((part for part in (before, after) if part is not None), torch.zeros_like(expected[name]))
            require_near(found, expected[name], EXACT, f"gradient of {name}, cut before block {block}")


@check
def backward_may_come_in_any_order(subject: Subject) -> None:
    """Two forward passes may be there at once, and either's gradients be asked for first, or twice: micro-batches and probes do so. What a
    backward pass needs belongs to its own forward pass."""
    model, batches = subject.moved(), [some_tokens(seed=1), some_tokens(seed=2)]
    expected = [gradients(model, model(tokens)) for tokens in batches]
    logits = [model(tokens) for tokens in batches]
    for number, which in enumerate((0, 1, 0)):
        for name, gradient in gradients(model, logits[which], retain_graph=True).items():
            what = ("the first of two passes", "the second of two passes", "the first of two passes, once more")[number]
            require_near(gradient, expected[which][name], EXACT, f"gradient of {name} from {what}")
