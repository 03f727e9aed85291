"""From the messages of a conversation to those that chat templates take."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_parallm.api.http.json_body import check_values
from mlx_parallm.api.turns.arguments import arguments_object
from mlx_parallm.api.turns.fields import BodyValue
from mlx_parallm.api.turns.tools import CUSTOM_INPUT
from mlx_parallm.types.json_values import is_mapping

# Protocols and model families call the thoughts of an earlier turn by either name.
REASONING_KEYS = ("reasoning_content", "reasoning")
# SUMMARY: how the turn begins that takes the place of a conversation before it.
SUMMARY = "A summary of this conversation up to here:"


def template_messages(
    messages: Sequence[Mapping[str, Any]], *, id_length: int | None = None
) -> list[dict[str, Any]]:
    """Return messages with arguments of tool calls as objects, and reasoning under both its names.

    OpenAI writes arguments as a text, templates want the object. A text that was cut gives its
    complete part; one that is no JSON object is under ``INVALID_JSON``. The deprecated
    ``function_call`` and the role ``function`` become a tool call and its result.

    Args:
        messages: each with a ``role`` and a text as ``content``; perhaps ``tool_calls``,
            ``tool_call_id`` and ``reasoning_content``.
        id_length: letters and digits of a call's id; others get one made of them. None for any id.

    Raises:
        InvalidRequestError: a tool call or a tool's message is malformed; names its field.
    """
    read = [_message(message) for message in BodyValue(messages, "messages").entries()]
    return read if id_length is None else [_with_short_ids(message, id_length) for message in read]


def _with_short_ids(message: dict[str, Any], length: int) -> dict[str, Any]:
    if message.get("role") == "tool":
        return message | {"tool_call_id": _short_id(message["tool_call_id"], length)}
    if message.get("role") != "assistant" or "tool_calls" not in message:
        return message
    calls = message["tool_calls"]
    return message | {
        "tool_calls": [
            call | {"id": _short_id(call["id"], length)} if "id" in call else call for call in calls
        ]
    }


def _short_id(call_id: str, length: int) -> str:
    """Return an id of this length: the id itself, or one derived from it."""
    if len(call_id) == length and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:length]


def _message(message: BodyValue) -> dict[str, Any]:
    result: dict[str, Any] = dict(message.value)
    match result.get("role"):
        case "function":
            return result | {"role": "tool", "tool_call_id": message["name"].filled_text()}
        case "tool":
            message["tool_call_id"].filled_text()
        case "assistant":
            _read_assistant(message, result)
        case _:
            pass
    return result


def _read_assistant(message: BodyValue, result: dict[str, Any]) -> None:
    texts = [message[key].optional_text() for key in REASONING_KEYS]
    reasoning = next((text for text in texts if text is not None), None)
    if reasoning is not None:
        result |= dict.fromkeys(REASONING_KEYS, reasoning)
    for key in ("function_call", "tool_calls"):
        result.pop(key, None)
    # Templates ask whether the key is there.
    if calls := _calls(message):
        result["tool_calls"] = calls


def _calls(message: BodyValue) -> list[dict[str, Any]]:
    calls, old = message["tool_calls"], message["function_call"]
    if calls.value is None:
        if old.value is None:
            return []
        call = {"id": old["name"].value, "type": "function", "function": old.value}
        calls = BodyValue([call], calls.where)
    return [_call(call) for call in calls.entries()]


def _call(call: BodyValue) -> dict[str, Any]:
    if call.object().type == "custom":
        custom = call["custom"].object()
        name, arguments = custom["name"].filled_text(), {CUSTOM_INPUT: custom["input"].text()}
    else:
        function = call["function"].object()
        name, arguments = function["name"].filled_text(), _arguments(function["arguments"])
    id_ = {} if call["id"].value is None else {"id": call["id"].filled_text()}
    return id_ | {"type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(arguments: BodyValue) -> Mapping[str, Any]:
    """Return the arguments as an object; see ``arguments_object``."""
    if is_mapping(arguments.value):
        return arguments.value
    text = arguments.optional_text() or ""
    check_values(text.encode())
    return arguments_object(text)
