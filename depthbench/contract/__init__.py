"""The contract of a residual design, as checks that anybody can run on a design of their own.

    from depthbench import contract
    contract.states_are_never_changed("hc", streams=2)              # one check: silent, or a ContractError that says what is wrong
    contract.is_causal("my_module.MyDesign")
    for outcome in contract.outcomes(MyDesign, lanes=3): ...        # all of them; `depthbench check my_module.MyDesign` prints these

A check takes a design (a name, a dotted name or a class) and its options. It builds models small enough that all checks together take
seconds, on the CPU. Most run in fp64 with every parameter moved away from its initial value, lest a path behind a zero stay untested.
"""

from depthbench.contract.compilation import compiled_equals_eager
from depthbench.contract.construction import (
    a_checkpoint_restores_the_function,
    extra_parameters_equal_their_formula,
    meta_build_equals_direct_build,
    parameter_groups_are_complete,
    what_is_shared_with_pre_ln_is_equal,
)
from depthbench.contract.depth import depth_gradients_exist, depth_states_and_readouts_exist, the_linear_form_composes
from depthbench.contract.function import (
    any_batch_and_length_work,
    every_parameter_gets_a_gradient,
    every_parameter_is_in_the_graph_at_init,
    heads_may_be_shared_and_normed,
    is_causal,
    the_state_is_carried_on,
)
from depthbench.contract.interventions import skipping_a_block_follows_the_rules, swapping_twice_is_the_identity, taps_see_every_sublayer
from depthbench.contract.parallel import two_processes_equal_one
from depthbench.contract.precision import bf16_stays_near_fp32
from depthbench.contract.state import (
    a_run_restarts_after_later_blocks_changed_places,
    a_run_restarts_at_every_boundary,
    backward_may_come_in_any_order,
    gradients_pass_every_boundary,
    states_are_never_changed,
    two_runs_from_one_state_keep_apart,
)
from depthbench.contract.subject import ContractError, NotDefined, Subject
from depthbench.contract.suite import CHECKS, Outcome, outcomes

__all__ = [
    "CHECKS",
    "ContractError",
    "NotDefined",
    "Outcome",
    "Subject",
    "a_checkpoint_restores_the_function",
    "a_run_restarts_after_later_blocks_changed_places",
    "a_run_restarts_at_every_boundary",
    "any_batch_and_length_work",
    "backward_may_come_in_any_order",
    "bf16_stays_near_fp32",
    "compiled_equals_eager",
    "depth_gradients_exist",
    "depth_states_and_readouts_exist",
    "every_parameter_gets_a_gradient",
    "every_parameter_is_in_the_graph_at_init",
    "extra_parameters_equal_their_formula",
    "gradients_pass_every_boundary",
    "heads_may_be_shared_and_normed",
    "is_causal",
    "meta_build_equals_direct_build",
    "outcomes",
    "parameter_groups_are_complete",
    "skipping_a_block_follows_the_rules",
    "states_are_never_changed",
    "swapping_twice_is_the_identity",
    "taps_see_every_sublayer",
    "the_linear_form_composes",
    "the_state_is_carried_on",
    "two_processes_equal_one",
    "two_runs_from_one_state_keep_apart",
    "what_is_shared_with_pre_ln_is_equal",
]
