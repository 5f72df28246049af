"""A design's options: read from its constructor, checked by kind, described by its docstring."""

from __future__ import annotations

import pytest

from depthbench import residuals
from depthbench.errors import UserError
from depthbench.residuals import checked_options, chosen_options, options_of
from depthbench.residuals.pre_ln import PreLN


class Many(PreLN):
    """A design of options.

    streams: how many streams
    """

    def __init__(
        self, config, *, streams: int = 4, gain: float | None = None, tanh: bool = True, kind: str = "soft", loose=1, anything=None
    ):
        super().__init__(config)


class Needy(PreLN):
    def __init__(self, config, *, width: int):
        super().__init__(config)


def test_defaults_kinds_and_texts_come_from_the_class():
    known = options_of(Many)
    assert [*known] == ["streams", "gain", "tanh", "kind", "loose", "anything"]
    assert known["streams"].text == "how many streams" and known["gain"].text == ""
    assert known["gain"].accepts == "a number or null" and known["loose"].kinds == (int,) and known["anything"].kinds == ()
    assert checked_options(Many, {}) == {"streams": 4, "gain": None, "tanh": True, "kind": "soft", "loose": 1, "anything": None}


def test_text_from_a_command_line_becomes_the_values_kind():
    given = {"streams": "2", "gain": "1e-8", "tanh": "false", "kind": "3", "anything": "[1, 2]"}
    values = checked_options(Many, given)
    assert values == {"streams": 2, "gain": 1e-8, "tanh": False, "kind": "3", "loose": 1, "anything": [1, 2]}
    assert type(checked_options(Many, {"gain": 2})["gain"]) is float
    assert checked_options(Many, {"gain": "null"})["gain"] is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"streams": 2.0}, "streams cannot be 2.0: give a whole number (how many streams)"),
        ({"streams": True}, "streams cannot be True: give a whole number"),
        ({"streams": "two"}, "streams cannot be 'two'"),
        ({"streams": None}, "streams cannot be None"),
        ({"tanh": 1}, "tanh cannot be 1: give true or false"),
        ({"gain": "{"}, "gain cannot be '{': give a number or null"),
        ({"strems": 2}, "unknown option 'strems': did you mean 'streams'?"),
    ],
)
def test_a_wrong_value_is_one_line(given, says):
    with pytest.raises(UserError) as error:
        checked_options(Many, given)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_an_option_without_a_default_must_be_given():
    with pytest.raises(UserError, match="Needy needs width: give --arch.width VALUE"):
        checked_options(Needy, {})
    assert checked_options(Needy, {"width": 3}) == {"width": 3}


def test_what_is_chosen_is_what_differs_from_the_defaults():
    assert chosen_options(Many, checked_options(Many, {"streams": 4, "tanh": False})) == {"tanh": False}


@pytest.mark.parametrize("name", residuals.names())
def test_every_option_of_a_design_is_described_and_has_a_kind(name):
    for option in options_of(residuals.get(name)).values():
        assert option.text and option.kinds, option.name
