"""Controls whose value lives in the URL and in the session: a link restores the view, and so does coming back to a page.

A control's key is also its query parameter. A value equal to the default is left out of the URL, unless the default depends on the
data (``pin``): then the same link would show something else tomorrow. A value that is no longer among the options (another runs folder,
an old link) falls back to the default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import streamlit as st

_NOTHING = "-"  # in the URL: nothing chosen, where the default is something


def one(widget: Callable, label: str, options: Iterable, *, key: str, default: Any = None, pin: bool = False, **options_of_widget) -> Any:
    """One of several options, by st.selectbox, st.segmented_control or st.select_slider. The default is the first option."""
    options = list(options)
    default = options[0] if default is None else default
    if st.session_state.get(key) not in options:
        st.session_state[key] = next((o for o in options if [str(o)] == _wanted(key)), default)
    value = widget(label, options, key=key, **options_of_widget)
    value = default if value is None else value
    _remember(key, [str(value)] if pin or value != default else [])
    return value


def many(
    widget: Callable, label: str, options: Iterable, *, key: str, default: Iterable = (), pin: bool = False, **options_of_widget
) -> list:
    """Any number of options, by st.multiselect or st.pills. The default is none of them, unless given."""
    options, default = list(options), list(default)
    wanted = _wanted(key)
    if key in st.session_state:
        st.session_state[key] = [o for o in st.session_state[key] if o in options]
    elif wanted is None:
        st.session_state[key] = default
    else:
        st.session_state[key] = [o for o in options if str(o) in wanted] or ([] if wanted == [_NOTHING] else default)
    value = list(widget(label, options, key=key, **options_of_widget) or [])
    _remember(key, ([str(v) for v in value] or [_NOTHING]) if pin or value != default else [])
    return value


def switch(label: str, *, key: str, default: bool = False, **options_of_widget) -> bool:
    """A toggle."""
    if key not in st.session_state:
        wanted = _wanted(key)
        st.session_state[key] = default if wanted is None else wanted == ["1"]
    value = st.toggle(label, key=key, **options_of_widget)
    _remember(key, [] if value == default else ["1" if value else "0"])
    return value


def text(label: str, *, key: str, **options_of_widget) -> str:
    """A line of text."""
    if key not in st.session_state:
        st.session_state[key] = (_wanted(key) or [""])[0]
    value = st.text_input(label, key=key, **options_of_widget).strip()
    _remember(key, [value] if value else [])
    return value


def kept(key: str) -> list[str]:
    """A list that no widget holds (the rows picked in a table), restored like a control."""
    return _wanted(key) or []


def keep(key: str, values: list[str]) -> None:
    """Set what ``kept`` returns."""
    _remember(key, values)


def _shadow() -> dict[str, list[str]]:
    return st.session_state.setdefault("_kept", {})


def _wanted(key: str) -> list[str] | None:
    """What the URL, else this session, last had for ``key``; None for the default."""
    return st.query_params.get_all(key) or _shadow().get(key) or None


def _remember(key: str, values: list[str]) -> None:
    _shadow()[key] = values
    if values and st.query_params.get_all(key) != values:
        st.query_params[key] = values
    elif not values and key in st.query_params:
        del st.query_params[key]
