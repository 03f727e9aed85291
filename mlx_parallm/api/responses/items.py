"""Items of an input: checked, completed, and in one form.

The forms are those of the Responses API (openai/types/responses of OpenAI's Python SDK).
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlx_parallm.types.errors import InvalidRequestError

Item = dict[str, Any]
#: Finds a stored item by its id; None if there is none.
FindItem = Callable[[str], Item | None]

ROLES = ("user", "system", "developer", "assistant")
ID_BYTES = 16
SEAL = "mlx_parallm reasoning: "
ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
# Of tools that run on OpenAI's servers: nothing of them can be told to a model here.
HOSTED = frozenset(
    [
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "computer_call",
        "computer_call_output",
        "configuration_update",
        "file_search_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "shell_call",
        "shell_call_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    ]
)
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def new_id(type_: str) -> str:
    """A fresh id of an item."""
    return f"{ID_PREFIXES[type_]}_{secrets.token_hex(ID_BYTES)}"


def sealed(text: str) -> str:
    """Reasoning as a client hands it back unread: base64, no secret."""
    return base64.urlsafe_b64encode(f"{SEAL}{text}".encode()).decode()


def unsealed(value: str) -> str | None:
    """The reasoning that ``sealed`` made this of; None if it is somebody else's."""
    try:
        text = base64.urlsafe_b64decode(value.encode()).decode()
    except (binascii.Error, ValueError):
        return None
    return text.removeprefix(SEAL) if text.startswith(SEAL) else None


def input_items(given: str | Sequence[Mapping[str, Any]], find: FindItem) -> list[Item]:
    """The items of a body's ``input``, each with an id; references are replaced by what they name.

    Raises:
        InvalidRequestError: one is malformed, or of a type that is not served; names its field, as
            ``input[3].content[0].type``.
    """
    if isinstance(given, str):
        return [_message({"role": "user", "content": given}, "input")] if given else []
    items: list[Item] = []
    for number, item in enumerate(given):
        where = f"input[{number}]"
        type_ = item.get("type", "message")
        if not isinstance(type_, str):
            raise _refusal(f"{where}.type", "must be a text")
        if type_ == "item_reference":
            items.append(_referred(item, where, find))
        elif type_ in _READERS:
            items.append(_READERS[type_](item, where))
        elif type_ not in HOSTED:
            raise _refusal(f"{where}.type", f"{type_[:64]!r} is not served", unsupported=True)
    return items


def _referred(item: Mapping[str, Any], where: str, find: FindItem) -> Item:
    name = _text(item, "id", where)
    found = find(name)
    if found is None:
        raise _refusal(f"{where}.id", f"{name[:128]!r} is no stored item")
    return found


def _message(item: Mapping[str, Any], where: str) -> Item:
    role = item.get("role")
    if role not in ROLES:
        raise _refusal(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    content = item.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise _refusal(f"{where}.content", "must be a text or a list of parts")
    parts = [
        _message_part(part, role, f"{where}.content[{number}]")
        for number, part in enumerate(content)
    ]
    read = _head(item, "message", where) | {
        "status": "completed",
        "role": role,
        "content": parts,
    }
    phase = item.get("phase")
    return read | {"phase": phase} if isinstance(phase, str) else read


def _message_part(part: Any, role: str, where: str) -> Item:
    if isinstance(part, Mapping) and part.get("type") == "refusal":
        return {"type": "refusal", "refusal": _text(part, "refusal", where)}
    text = _part_text(part, where)
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": text}


def _part_text(part: Any, where: str) -> str:
    if not isinstance(part, Mapping):
        raise _refusal(where, "must be an object")
    if part.get("type") not in TEXT_PARTS:
        raise _refusal(
            f"{where}.type", "must be that of a text: nothing else is served", unsupported=True
        )
    return _text(part, "text", where)


def _function_call(item: Mapping[str, Any], where: str) -> Item:
    return _call(item, "function_call", where) | {"arguments": _text(item, "arguments", where)}


def _custom_call(item: Mapping[str, Any], where: str) -> Item:
    return _call(item, "custom_tool_call", where) | {"input": _text(item, "input", where)}


def _call(item: Mapping[str, Any], type_: str, where: str) -> Item:
    read = _head(item, type_, where) | {
        "status": "completed",
        "call_id": _name(item, "call_id", where),
        "name": _name(item, "name", where),
    }
    if item.get("namespace") is None:
        return read
    return read | {"namespace": _name(item, "namespace", where)}


def _output(item: Mapping[str, Any], where: str) -> Item:
    output = item.get("output")
    if isinstance(output, list):
        output = [
            {"type": "input_text", "text": _part_text(part, f"{where}.output[{number}]")}
            for number, part in enumerate(output)
        ]
    elif not isinstance(output, str):
        raise _refusal(f"{where}.output", "must be a text or a list of parts")
    return _head(item, item["type"], where) | {
        "status": "completed",
        "call_id": _name(item, "call_id", where),
        "output": output,
    }


def _reasoning(item: Mapping[str, Any], where: str) -> Item:
    read = _head(item, "reasoning", where)
    for key, type_ in (("summary", "summary_text"), ("content", "reasoning_text")):
        given = item.get(key)
        if given is not None and not isinstance(given, list):
            raise _refusal(f"{where}.{key}", "must be a list of parts")
        read[key] = [
            {"type": type_, "text": _part_text(part, f"{where}.{key}[{number}]")}
            for number, part in enumerate(given or ())
        ]
    secret = item.get("encrypted_content")
    return read | {"encrypted_content": secret if isinstance(secret, str) else None}


def _head(item: Mapping[str, Any], type_: str, where: str) -> Item:
    id_ = new_id(type_) if item.get("id") is None else _name(item, "id", where)
    return {"id": id_, "type": type_}


def _text(item: Mapping[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise _refusal(f"{where}.{key}", "must be a text")
    return value


def _name(item: Mapping[str, Any], key: str, where: str) -> str:
    if value := _text(item, key, where):
        return value
    raise _refusal(f"{where}.{key}", "must be a text that is not empty")


def _refusal(param: str, why: str, *, unsupported: bool = False) -> InvalidRequestError:
    code = "unsupported_parameter" if unsupported else None
    return InvalidRequestError(f"{param} {why}.", param=param, code=code)


_READERS: Mapping[str, Callable[[Mapping[str, Any], str], Item]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _output,
    "reasoning": _reasoning,
}
