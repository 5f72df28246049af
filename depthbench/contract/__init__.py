"""The contract of a residual design, as checks that anybody can run on a design of their own.

    from depthbench import contract
    contract.states_are_never_changed("hc", streams=2)              # one check: silent, or a ContractError that says what is wrong
    contract.is_causal("my_module.MyDesign")
    for outcome in contract.outcomes(MyDesign, lanes=3): ...        # all of them; `depthbench check my_module.MyDesign` prints these

A check takes a design (a name, a dotted name or a class) and its options. It builds models small enough that all checks together take
seconds, on the CPU. Most run in fp64 with every parameter moved away from its initial value, lest a path behind a zero stay untested.
"""

from depthbench.contract.subject import CHECKS, ContractError, NotDefined, Subject  # isort: skip
from depthbench.contract.function import *  # noqa: F403  (the order of these is the order of CHECKS)
from depthbench.contract.construction import *  # noqa: F403
from depthbench.contract.state import *  # noqa: F403
from depthbench.contract.depth import *  # noqa: F403
from depthbench.contract.interventions import *  # noqa: F403
from depthbench.contract.compilation import *  # noqa: F403
from depthbench.contract.precision import *  # noqa: F403
from depthbench.contract.parallel import *  # noqa: F403
from depthbench.contract.outcomes import Outcome, outcomes

__all__ = ["CHECKS", "ContractError", "NotDefined", "Outcome", "Subject", "outcomes", *CHECKS]
