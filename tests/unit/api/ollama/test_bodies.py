"""Bodies of Ollama's routes: durations, and results that belong to calls."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mlx_parallm.api.ollama.request import conversation
from mlx_parallm.api.ollama.schema import ModelRequest, OllamaMessage


def keep_alive(value: Any) -> float | None:
    return ModelRequest.model_validate({"keep_alive": value}).keep_alive


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        (300, 300),
        (0, 0),
        (-1, math.inf),
        ("300", 300),
        ("0", 0),
        ("-1", math.inf),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5s", 1.5),
        ("300ms", 0.3),
        ("-1s", math.inf),
        ("-1m", math.inf),
        ("0s", 0),
    ],
)
def test_durations_are_read_as_clients_write_them(value: Any, seconds: float | None) -> None:
    assert keep_alive(value) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("value", [True, "", "m", "5x", "5 m", "s5", [], {}, "1" * 65, "nan"])
def test_others_are_refused(value: Any) -> None:
    with pytest.raises(ValidationError, match="must be seconds"):
        keep_alive(value)


@given(st.text(max_size=20))
def test_any_text_is_a_time_or_refused(text: str) -> None:
    with contextlib.suppress(ValidationError):
        assert (keep_alive(text) or 0) >= 0


def call(name: str, **more: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": {}}} | more


def read(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return conversation([OllamaMessage.model_validate(message) for message in messages])


def test_a_result_belongs_to_the_first_open_call_of_its_tool() -> None:
    calls = [call("f"), call("g"), call("f", id="own")]
    results: list[dict[str, Any]] = [
        {"role": "tool", "tool_name": "g"},
        {"role": "tool"},
        {"role": "tool", "name": "f"},
        {"role": "tool", "tool_name": "f"},
    ]
    called, *answered = read({"role": "assistant", "tool_calls": calls}, *results)
    ids = [each["id"] for each in called["tool_calls"]]
    assert len(set(ids)) == 3
    assert [each["tool_call_id"] for each in answered[:3]] == [ids[1], ids[0], "own"]
    assert [each["name"] for each in answered] == ["g", "f", "f", "f"]
    # A result without a call still has an id, which templates want.
    assert answered[3]["tool_call_id"] not in ids


def test_only_empty_last_messages_of_the_assistant_are_left_out() -> None:
    user = {"role": "user", "content": ""}
    empty = {"role": "assistant", "content": None}
    assert read(user, empty, user, empty, empty) == [user, empty | {"content": ""}, user]
