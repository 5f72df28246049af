"""The layer probes: what does each layer of a trained model do?

Each is a function ``probe(model, tokens, *, micro_batch=8, progress=None) -> DataFrame`` (causal and pruning also take ``rule``), for any
design and any model of ours, whether it comes from a run or from your own code:

    from depthbench import load_run, probes

    run = load_run("pre_ln-nano-L5")
    probes.angular(run.model, probes.windows(run.held_out))

The frame has the columns ``metric``, ``i``, ``j``, ``value``, ``n_tokens``, ``rule``, ``status``, ``note``. A probe that has no meaning
for a design gives one row of status ``not_defined``, its ``note`` the reason. ``depthbench probe RUN`` runs them all and keeps what
they give.
"""

from __future__ import annotations

from depthbench.probes.angular import angular
from depthbench.probes.causal import causal, skips
from depthbench.probes.collapse import collapse
from depthbench.probes.jacobian import jacobian
from depthbench.probes.logit_lens import logit_lens
from depthbench.probes.norms import norms
from depthbench.probes.paths import paths
from depthbench.probes.permutation import permutation
from depthbench.probes.pruning import pruning
from depthbench.probes.transport import transport
from depthbench.probes.usefulness import usefulness
from depthbench.probes.windows import windows

__all__ = [
    "angular",
    "causal",
    "collapse",
    "jacobian",
    "logit_lens",
    "norms",
    "paths",
    "permutation",
    "pruning",
    "skips",
    "transport",
    "usefulness",
    "windows",
]
