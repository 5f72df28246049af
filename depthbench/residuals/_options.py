"""The options of a design: the keywords of its constructor, read from its signature, its annotations and its docstring."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from depthbench.errors import UserError, unknown

KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a name"}


@dataclass(frozen=True)
class Option:
    """One keyword of a design's constructor. ``kinds`` is what its annotation accepts; where there is none, what its default is."""

    name: str
    kinds: tuple[type, ...]
    default: Any
    text: str

    @property
    def accepts(self) -> str:
        """What may be given, in words."""
        words = [KINDS[kind] for kind in self.kinds if kind in KINDS]
        return " or ".join([*words, *["null"] * (type(None) in self.kinds)])

    def value(self, given: Any) -> Any:
        """``given`` as this option takes it; text, as a command line gives it, is read as YAML. Raises UserError in one line."""
        value = _as_yaml(given) if isinstance(given, str) and str not in self.kinds else given
        if float in self.kinds and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if self.kinds and type(value) not in self.kinds:
            raise UserError(f"{self.name} cannot be {given!r}: give {self.accepts}{self.text and f' ({self.text})'}")
        return value


def options_of(design: type) -> dict[str, Option]:
    """The options of a design by name, in the order of its constructor.

    An option's text is the line ``name: text`` of the class's docstring, where there is one.
    """
    parameters = list(inspect.signature(design).parameters.values())
    for p in parameters[1:]:  # after the configuration
        if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty:
            raise UserError(
                f"{design.__name__} takes {p.name} by position, but options are keywords: write __init__(self, config, *, {p.name})"
            )
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    hints = typing.get_type_hints(design.__init__) if keywords else {}
    texts = dict(re.findall(r"^\s*(\w+): (.*?)\s*$", inspect.getdoc(design) or "", re.MULTILINE))
    return {p.name: Option(p.name, _kinds(hints.get(p.name), p.default), p.default, texts.get(p.name, "")) for p in keywords}


def checked_options(design: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of the design with its value: as given, else the default.

    Raises UserError, in one line, for an unknown name, a value of the wrong kind, or a missing one. Values out of range are the
    constructor's to refuse.
    """
    known = options_of(design)
    for name in given:
        if name not in known:
            raise unknown("option", name, known) if known else UserError(f"unknown option '{name}': {design.__name__} takes none")
    values = {name: option.value(given[name]) if name in given else option.default for name, option in known.items()}
    for name, value in values.items():
        if value is inspect.Parameter.empty:
            raise UserError(f"{design.__name__} needs {name}: give --arch.{name} VALUE")
    return values


def chosen_options(design: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``values`` that are not the default: what sets one run of a design apart from another."""
    known = options_of(design)
    return {name: value for name, value in values.items() if value != known[name].default}


def _kinds(annotation: Any, default: Any) -> tuple[type, ...]:
    if annotation is None:
        return () if default in (None, inspect.Parameter.empty) else (type(default),)
    members = typing.get_args(annotation) if typing.get_origin(annotation) in (types.UnionType, typing.Union) else ()
    members = members or (annotation,)
    return members if all(member in KINDS or member is type(None) for member in members) else ()


def _as_yaml(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return float(text) if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", text) else value
