"""All checks of a design, one outcome each."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from depthbench.contract import compilation, construction, depth, function, interventions, parallel, precision, state
from depthbench.contract.explain import brief
from depthbench.contract.subject import NotDefined, Subject
from depthbench.errors import UserError, unknown
from depthbench.residuals.base import Residual

GROUPS = (function, construction, state, depth, interventions, compilation, precision, parallel)
CHECKS = {name: value for group in GROUPS for name, value in vars(group).items() if hasattr(value, "on_subject")}

OK, FAILED, NOT_DEFINED = "ok", "FAILED", "not defined"


class Outcome(NamedTuple):
    check: str
    group: str  # what the check is about: function, construction, state, ...
    verdict: str  # "ok", "FAILED" or "not defined"
    message: str = ""  # what is wrong, or why it is not defined
    traceback: str = ""  # the whole of it, where something was raised that is no ContractError


def outcomes(design: str | type[Residual], /, *, only: Iterable[str] = (), **options: Any) -> Iterator[Outcome]:
    """Runs the checks, or those of ``only``, one after another as their outcomes are asked for.

    Raises UserError for a design, an option or a name that is not known, and where the design refuses its options.
    """
    only = list(only)
    for name in only:
        if name not in CHECKS:
            raise unknown("check", name, CHECKS)
    subject = Subject(design, options)
    refuse_unusable(subject)
    return (outcome_of(name, check, subject) for name, check in CHECKS.items() if not only or name in only)


def refuse_unusable(subject: Subject) -> None:
    """Raises the design's own UserError for options that it refuses. What else a constructor may raise, the checks will tell."""
    try:
        with torch.device("meta"):
            subject.fresh()
    except UserError:
        raise
    except Exception:
        return


def outcome_of(name: str, check: Any, subject: Subject) -> Outcome:
    group = check.__module__.rpartition(".")[2]
    try:
        check.on_subject(subject)
    except NotDefined as reason:
        return Outcome(name, group, NOT_DEFINED, str(reason))
    except Exception as error:
        whole = "".join(traceback.format_exception(error))
        return Outcome(name, group, FAILED, brief(error, subject.design), whole)
    return Outcome(name, group, OK)
