"""Runs probes on a recorded run: one measurement after the other, each on disk before the next starts.

A measurement is a probe at a step, for the two that leave blocks out by one skip rule. Its rows share the time they were measured at
and what they were measured on; of a repeated one the store returns the latest (store/schema.py, ``MEASURED``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from torch import Tensor

from depthbench import probes
from depthbench.errors import UserError, unknown
from depthbench.nn.model import LanguageModel
from depthbench.probes.base import MICRO_BATCH, Progress, Rows
from depthbench.probes.headlines import headline
from depthbench.store.reader import Store
from depthbench.store.writer import RunWriter

# In the order they run: what is cheap is there first.
NAMES = ("norms", "angular", "logit_lens", "collapse", "paths", "transport", "causal", "pruning", "jacobian", "usefulness", "permutation")
BY_RULE = ("causal", "pruning")  # they leave blocks out by a skip rule, and share their passes

Show = Callable[[str], AbstractContextManager[Progress]]  # a measurement's title -> where its progress goes


class Measurement(NamedTuple):
    """One probe of ``NAMES``, and the skip rule where it leaves blocks out."""

    probe: str
    rule: str | None = None

    def __str__(self) -> str:
        return titled([self.probe], self.rule)


def titled(names: Sequence[str], rule: str | None) -> str:
    return " and ".join(names) + (f" ({rule})" if rule else "")


class Subject(NamedTuple):
    """What is measured: a run's model at a step, after ``tokens_seen`` training tokens, on held-out ``windows`` (n, T + 1)."""

    folder: Path
    model: LanguageModel
    windows: Tensor
    step: int
    tokens_seen: int

    @property
    def facts(self) -> dict:
        """Columns of the store that are the same in all rows."""
        n, length = self.windows[:, 1:].shape
        return {"step": self.step, "tokens": self.tokens_seen, "windows": n, "length": length}


def chosen(text: str) -> list[str]:
    """The probes that a comma-separated list names (``all``: every one), in the order they run. Raises UserError for another name."""
    names = list(filter(None, (name.strip().replace("-", "_") for name in text.split(","))))
    for name in names:
        if name not in (*NAMES, "all"):
            raise unknown("probe", name, (*NAMES, "all"))
    if not names:
        raise UserError(f"no probe is named: give some of {', '.join(NAMES)}, or all")
    return [name for name in NAMES if name in names or "all" in names]


def measurements(model: LanguageModel, names: Iterable[str], skip_rule: str | None = None) -> list[Measurement]:
    """What to measure for these probes: by every skip rule of the design, its default first, or by ``skip_rule`` alone.

    Raises UserError where the design has no such rule.
    """
    residual = model.residual
    rules = residual.skip_rules if skip_rule is None else (residual.skip_rule(skip_rule),)
    return [Measurement(name, rule) for name in names for rule in (rules if name in BY_RULE else (None,))]


def found(subject: Subject) -> dict[Measurement, pd.DataFrame]:
    """What the store holds of the subject: the rows of what was measured at this step, on as many windows of the same length."""
    rows = Store(subject.folder.parent).probes([subject.folder.name])
    same = rows[(rows[list(subject.facts)] == pd.Series(subject.facts)).all(axis=1)]
    groups = same.groupby(["probe", "rule"], dropna=False, sort=False)
    return {Measurement(probe, None if pd.isna(rule) else rule): group for (probe, rule), group in groups}


def summary(subject: Subject, wanted: Sequence[Measurement]) -> str:
    """A line for each measurement: what it found."""
    held = found(subject)
    width = max(map(len, map(str, wanted)))
    return "\n".join(f"{measurement!s:<{width}}  {headline(measurement.probe, held[measurement])}" for measurement in wanted)


def silent(title: str) -> AbstractContextManager[Progress]:
    """Shows no progress."""
    return nullcontext(lambda done: None)


def measure(
    writer: RunWriter, subject: Subject, wanted: Sequence[Measurement], *, micro_batch: int = MICRO_BATCH, show: Show = silent
) -> None:
    """Measure all of ``wanted`` and add the rows to the run that ``writer`` writes. Whatever interrupts it, what was measured stays."""
    newest = Store(subject.folder.parent).probes([subject.folder.name])["measured_at"].max()
    for together in taken_together(wanted):
        with show(titled([measurement.probe for measurement in together], together[0].rule)) as progress:
            frames = take(subject, together, micro_batch, progress)
        measured_at = later_than(newest)
        rows = [row for measurement, frame in frames.items() for row in stored(frame, measurement, subject, measured_at)]
        writer.add("probes", rows)
        writer.drain()


def taken_together(wanted: Sequence[Measurement]) -> list[tuple[Measurement, ...]]:
    """The measurements in their order, those that share their passes side by side."""
    groups: dict[Measurement | str | None, list[Measurement]] = {}
    for measurement in wanted:
        groups.setdefault(measurement.rule or measurement, []).append(measurement)
    return [tuple(group) for group in groups.values()]


def take(subject: Subject, together: Sequence[Measurement], micro_batch: int, progress: Progress) -> dict[Measurement, pd.DataFrame]:
    """The frames of one group of ``taken_together``. A probe that refuses these windows is not defined on them: the others go on."""
    first, rule = together[0], together[0].rule
    probe = getattr(probes, first.probe) if len(together) == 1 else probes.skips
    try:
        given = probe(subject.model, subject.windows, micro_batch=micro_batch, progress=progress, **({"rule": rule} if rule else {}))
    except UserError as refusal:
        rows = Rows(subject.windows[:, 1:].numel(), rule)
        rows.not_defined(first.probe, str(refusal))
        return dict.fromkeys(together, rows.frame())
    return {first: given} if len(together) == 1 else {measurement: given[measurement.probe] for measurement in together}


def stored(frame: pd.DataFrame, measurement: Measurement, subject: Subject, measured_at: datetime) -> list[dict]:
    """A probe's frame as rows of the store. A value that is not defined is null, one that is no number is stored as such."""
    facts = {**subject.facts, **measurement._asdict(), "measured_at": measured_at}
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    values = [float(value) if status == "ok" else None for value, status in zip(frame["value"], frame["status"], strict=True)]
    return [{**row, **facts, "value": value} for row, value in zip(rows, values, strict=True)]


def later_than(newest: pd.Timestamp) -> datetime:
    """The time in UTC; a moment after ``newest`` where the clock was set back, so that a repeated measurement is the later one."""
    now = datetime.now(UTC).replace(tzinfo=None)
    return now if pd.isna(newest) or now > newest else newest.to_pydatetime() + timedelta(microseconds=1)
