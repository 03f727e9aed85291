"""Messages of a conversation as chat templates take them."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_parallm.api.turns.arguments import INVALID_JSON
from mlx_parallm.api.turns.history import template_messages
from mlx_parallm.types.errors import InvalidRequestError


def assistant(*calls: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)} | more


def call(arguments: Any, name: Any = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}} | more


def read_arguments(arguments: Any) -> Any:
    (message,) = template_messages([assistant(call(arguments))])
    return message["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ('{"a": [1, "é"]}', {"a": [1, "é"]}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("[1]", {INVALID_JSON: "[1]"}),
        ('{"path": "a.py", "text": "def f(', {"path": "a.py"}),
        ('{"a": ', {}),
        ("no JSON", {INVALID_JSON: "no JSON"}),
        # Half a surrogate pair inside a text of JSON inside JSON.
        (r'{"a": "\ud800"}', {INVALID_JSON: r'{"a": "\ud800"}'}),
        ('{"a": ' + "9" * 5000 + "}", {INVALID_JSON: '{"a": ' + "9" * 5000 + "}"}),
        ("[" * 100_000, {INVALID_JSON: "[" * 100_000}),
    ],
)
def test_arguments_become_an_object(arguments: Any, read: Any) -> None:
    assert read_arguments(arguments) == read


def test_the_id_is_kept_and_no_other_key() -> None:
    (message,) = template_messages([assistant(call("{}", id="c1", index=0, index_=1))])
    assert message["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {}}}
    ]


def test_a_custom_call_is_a_call_with_one_text() -> None:
    custom = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "x\ny"}}
    (message,) = template_messages([assistant(custom)])
    assert message["tool_calls"][0]["function"] == {
        "name": "patch",
        "arguments": {"input": "x\ny"},
    }


def test_the_deprecated_form_is_mapped() -> None:
    messages = template_messages(
        [
            {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "42"},
        ]
    )
    assert messages[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    assert "function_call" not in messages[0]
    assert (messages[1]["role"], messages[1]["tool_call_id"]) == ("tool", "f")


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_has_both_names(key: str) -> None:
    (message,) = template_messages([{"role": "assistant", "content": "a", key: "so"}])
    assert message["reasoning"] == message["reasoning_content"] == "so"


def test_no_calls_are_no_key() -> None:
    assert template_messages([assistant()]) == [{"role": "assistant", "content": ""}]


def test_what_came_is_not_changed() -> None:
    message = assistant(call("{}"))
    template_messages([message])
    assert message == assistant(call("{}"))


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "messages[1].tool_call_id"),
        ({"role": "function", "content": "x"}, "messages[1].name"),
        (assistant(tool_calls={}), "messages[1].tool_calls"),
        (assistant(5), "messages[1].tool_calls[0]"),
        (assistant(call("{}"), {}), "messages[1].tool_calls[1].function"),
        (assistant(call("{}", name=None)), "messages[1].tool_calls[0].function.name"),
        (assistant(call([1])), "messages[1].tool_calls[0].function.arguments"),
        (assistant(call(7)), "messages[1].tool_calls[0].function.arguments"),
        (assistant(call("{}", id=7)), "messages[1].tool_calls[0].id"),
        (assistant({"type": "custom"}), "messages[1].tool_calls[0].custom"),
        (
            assistant({"type": "custom", "custom": {"name": "a"}}),
            "messages[1].tool_calls[0].custom.input",
        ),
        (assistant(reasoning=[]), "messages[1].reasoning"),
        (
            {"role": "assistant", "content": "", "function_call": 5},
            "messages[1].tool_calls[0].function",
        ),
    ],
)
def test_a_bad_message_is_named(message: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        template_messages([{"role": "user", "content": "hi"}, message])
    assert refusal.value.param == field


def test_ids_are_made_short_where_a_template_takes_no_others() -> None:
    ours, theirs = f"call_{'0' * 24}", "a1B2c3D4e"
    messages = [
        assistant(call("{}", id=ours), call("{}", id=theirs)),
        {"role": "tool", "tool_call_id": ours, "content": "1"},
        {"role": "tool", "tool_call_id": theirs, "content": "2"},
    ]
    said, *results = template_messages(messages, id_length=9)
    ids = [call["id"] for call in said["tool_calls"]]
    assert ids == [result["tool_call_id"] for result in results]
    assert ids[1] == theirs
    assert len(ids[0]) == 9
    assert ids[0].isalnum()
    assert (
        ids[0]
        != template_messages([assistant(call("{}", id="d"))], id_length=9)[0]["tool_calls"][0]["id"]
    )
    assert messages[1]["tool_call_id"] == ours
