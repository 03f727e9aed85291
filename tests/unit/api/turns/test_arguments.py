"""Arguments of tool calls as objects."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.api.turns.arguments import INVALID_JSON, arguments_object


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", {}),
        (" \n", {}),
        ("{}", {}),
        ('{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ('{"a": 1, "b": "tex', {"a": 1}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": {"b": [1, 2', {"a": {"b": [1, 2]}}),
        ('{"a": "\u00e9"}', {"a": "\u00e9"}),
        ("{", {}),
    ],
)
def test_arguments_that_are_an_object_or_begin_one(text: str, value: dict[str, Any]) -> None:
    assert arguments_object(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "7",
        '"x"',
        "nonsense",
        "{'a': 1}",
        '{"a": 1} more',
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": "\\ud800"}',
        *('"', '"x', "tru", "nul", "-", "1e", "1.", "[", "[1", '"\\', '"\\u12'),
        '{"a": ' + "9" * 5000 + "}",
        '{"a": ' + "[" * 5000 + "]" * 5000 + "}",
    ],
)
def test_what_is_no_object_is_kept_as_text(text: str) -> None:
    value = arguments_object(text)
    assert value == {INVALID_JSON: text}
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


@given(
    st.dictionaries(
        st.text(max_size=3),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.text(max_size=3), inner, max_size=3)
            ),
            max_leaves=6,
        ),
        max_size=3,
    ),
    st.booleans(),
)
def test_every_beginning_of_an_object_is_an_object(value: dict[str, Any], is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    assert arguments_object(text) == value
    for length in range(len(text)):
        begun = arguments_object(text[:length])
        assert INVALID_JSON not in begun
        assert set(begun) <= set(value)
        json.dumps(begun, ensure_ascii=False, allow_nan=False).encode()


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text())


@given(VALUES.map(json.dumps), st.data())
def test_every_beginning_of_another_value_is_kept_as_text(text: str, data: st.DataObject) -> None:
    begun = text[: data.draw(st.integers(1, len(text)))]
    assert arguments_object(begun) == {INVALID_JSON: begun}
