"""The contract suite over every design that ships, every naive form, and a design from outside the package. There is no list of exemptions:
a design that ships takes every check. The naive forms are specifications, exact and slow, so that nobody compiles them."""

from __future__ import annotations

import pytest

from depthbench import contract, residuals
from depthbench.contract.parallel import in_two_processes, raise_if_wrong
from tests import naive
from tests.contract.external import TwoLanes
from tests.contract.test_broken import NotInTheGraph

NAIVE = naive.forms()
DESIGNS = [*residuals.names(), TwoLanes, *NAIVE]
OPTIONS = [
    ("keel", dict(alpha=3.0)),
    ("hc", dict(streams=1)),
    ("hc", dict(streams=3, dynamic=False)),
    ("hc", dict(scale_branch_init=True, norm_then_sum=True, mix_eps=1e-4)),
    ("mhc", dict(streams=3, bias_gap=1.0, iterations=3)),
    ("mhc", dict(scale_branch_init=True, norm_then_sum=True, mix_eps=1e-4)),
    ("full_attnres", dict(mix_eps=1e-4)),
    ("block_attnres", dict(group_size=1)),
    ("block_attnres", dict(group_size=3)),
    ("block_attnres", dict(group_size=99, mix_eps=1e-4)),
    ("moda", dict(rotate_depth_keys=True)),
]
EACH_ALONE = [name for name in contract.CHECKS if name not in ("compiled_equals_eager", "two_processes_equal_one")]


def label(design) -> str:
    return design if isinstance(design, str) else design.__name__


every_design = pytest.mark.parametrize("design", DESIGNS, ids=label)


@every_design
@pytest.mark.parametrize("name", EACH_ALONE)
def test_contract(name, design):
    try:
        contract.CHECKS[name](design)
    except contract.NotDefined as reason:
        assert name == "the_linear_form_composes" and not isinstance(design, str), reason  # all that ship have one


@pytest.mark.parametrize(("design", "options"), OPTIONS, ids=str)
def test_contract_with_options(design, options):
    failed = [outcome for outcome in contract.outcomes(design, only=EACH_ALONE, **options) if outcome.verdict != "ok"]
    assert failed == []


@pytest.mark.parametrize("design", [design for design in DESIGNS if design not in NAIVE], ids=label)
def test_compiled_equals_eager(design):
    contract.compiled_equals_eager(design)


@pytest.fixture(scope="session")
def found_in_two_processes():
    """All designs in one pair of processes, since their start is what takes time; one of them broken, which must not hinder the others."""
    designs = [DESIGNS[0], NotInTheGraph, *DESIGNS[1:]]
    return dict(zip(designs, in_two_processes([contract.Subject(design, {}) for design in designs]), strict=True))


@pytest.mark.xdist_group("two_processes")
@every_design
def test_two_processes_equal_one(found_in_two_processes, design):
    raise_if_wrong(found_in_two_processes[design])


@pytest.mark.xdist_group("two_processes")
def test_two_processes_notice_a_parameter_outside_the_graph(found_in_two_processes):
    broken = found_in_two_processes[NotInTheGraph]
    assert broken.message == "no gradient for residual.scale: two processes wait for it forever"
    assert "Traceback" in broken.whole
    with pytest.raises(contract.ContractError, match="no gradient for residual.scale"):
        raise_if_wrong(broken)


def test_a_run_outside_the_model_is_refused():
    model = contract.Subject("pre_ln", {}).fresh()
    state = model.embed(contract.subject.some_tokens())
    for start, stop in ((-1, 2), (2, 1), (0, 4)):
        with pytest.raises(ValueError, match="outside a model of 3"):
            model.run(state, start, stop)
