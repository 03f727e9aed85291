"""From the messages of a conversation to those that chat templates take."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_parallm.types.errors import InvalidRequestError

# Protocols and model families call the thoughts of an earlier turn by either name.
REASONING_KEYS = ("reasoning_content", "reasoning")


def template_messages(
    messages: Sequence[Mapping[str, Any]], *, id_length: int | None = None
) -> list[dict[str, Any]]:
    """The messages with arguments of tool calls as objects, and reasoning under both its names.

    OpenAI writes arguments as a text, most templates want the object. A text that is no JSON
    object stays as it is. The deprecated ``function_call`` and the role ``function`` become a tool
    call and its result.

    Args:
        messages: each with a ``role`` and a text as ``content``; perhaps ``tool_calls``,
            ``tool_call_id`` and ``reasoning_content``.
        id_length: letters and digits of a call's id; others get one made of them. None for any id.

    Raises:
        InvalidRequestError: a tool call or a tool's message is malformed; names its field.
    """
    read = [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]
    return read if id_length is None else [_with_short_ids(one, id_length) for one in read]


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
    """The id if it is of this length; one that is always the same for it if not."""
    if len(call_id) == length and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:length]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    result = dict(message)
    if result.get("role") == "function":
        _check_text(result.get("name"), f"{where}.name")
        result |= {"role": "tool", "tool_call_id": result["name"]}
    if result.get("role") == "tool":
        _check_text(result.get("tool_call_id"), f"{where}.tool_call_id")
    if result.get("role") == "assistant":
        _name_reasoning(result, where)
        _read_calls(result, where)
    return result


def _name_reasoning(message: dict[str, Any], where: str) -> None:
    given = [(key, message[key]) for key in REASONING_KEYS if message.get(key) is not None]
    for key, text in given:
        if not isinstance(text, str):
            raise _refusal(f"{where}.{key}", "must be a text")
    if given:
        message |= dict.fromkeys(REASONING_KEYS, given[0][1])


def _read_calls(message: dict[str, Any], where: str) -> None:
    old = message.pop("function_call", None)
    calls = message.get("tool_calls")
    if calls is None and old is not None:
        name = old.get("name") if isinstance(old, Mapping) else None
        calls = [{"id": name, "type": "function", "function": old}]
    if calls is None:
        return
    if not isinstance(calls, list):
        raise _refusal(f"{where}.tool_calls", "must be a list")
    read = [_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)]
    if read:
        message["tool_calls"] = read
    else:
        # Templates ask whether the key is there.
        del message["tool_calls"]


def _call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise _refusal(where, "must be an object")
    if call.get("type") == "custom":
        return _custom_call(call, where)
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise _refusal(f"{where}.function", "must be an object")
    _check_text(function.get("name"), f"{where}.function.name")
    arguments = function.get("arguments")
    if not isinstance(arguments, str | Mapping | None):
        raise _refusal(f"{where}.function.arguments", "must be a text")
    return _checked_id(call, where) | {
        "type": "function",
        "function": {"name": function["name"], "arguments": _object(arguments)},
    }


def _custom_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    custom = call.get("custom")
    if not isinstance(custom, Mapping):
        raise _refusal(f"{where}.custom", "must be an object")
    _check_text(custom.get("name"), f"{where}.custom.name")
    if not isinstance(custom.get("input"), str):
        raise _refusal(f"{where}.custom.input", "must be a text")
    function = {"name": custom["name"], "arguments": {"input": custom["input"]}}
    return _checked_id(call, where) | {"type": "function", "function": function}


def _checked_id(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    if call.get("id") is None:
        return {}
    _check_text(call["id"], f"{where}.id")
    return {"id": call["id"]}


def _object(arguments: str | Mapping[str, Any] | None) -> str | Mapping[str, Any]:
    """The arguments as an object if they are one."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
        # JSON in a text can hide half a surrogate pair from the check of the whole body.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _check_text(value: Any, where: str) -> None:
    if not isinstance(value, str) or not value:
        raise _refusal(where, "must be a text that is not empty")


def _refusal(param: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} {why}.", param=param)
