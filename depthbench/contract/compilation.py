"""torch.compile, region by region."""

from __future__ import annotations

import torch
from torch._dynamo.utils import counters

from depthbench.contract.subject import Subject, check, gradients, move, require, require_near, some_tokens

DEEP, MOST_GRAPHS = 24, 4


@check
def compiled_equals_eager(subject: Subject) -> None:
    """Compiled by region, a model gives the same logits and gradients and loads the same weights. A training step of 24 blocks takes at
    most 4 graphs: attention, feed-forward and two of the design's own. An index, a list that grows or a constant per depth inside a
    region would take a graph per block; a graph break is an error."""
    eager, compiled = (move(subject.fresh(n_layer=DEEP), 0.02) for _ in range(2))
    compiled.compile_regions(backend="aot_eager")
    require([*compiled.state_dict()] == [*eager.state_dict()], "compiling changes the names in the state_dict")
    expected = eager(some_tokens())
    expected_gradients = gradients(eager, expected)
    before = counters["stats"]["unique_graphs"]
    logits = compiled(some_tokens())
    found = gradients(compiled, logits)
    graphs = counters["stats"]["unique_graphs"] - before
    require(graphs <= MOST_GRAPHS, f"a training step of {DEEP} blocks takes {graphs} graphs, more than {MOST_GRAPHS}")
    require_near(logits, expected, 1e-5, "compiled logits against eager ones")
    for name, gradient in found.items():
        require_near(gradient, expected_gradients[name], 1e-4, f"compiled gradient of {name} against the eager one")
    with torch.no_grad():
        require_near(compiled(some_tokens()), expected, 1e-5, "compiled logits without gradients against eager ones")
