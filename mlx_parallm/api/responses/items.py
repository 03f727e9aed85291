"""Items of an input: checked, completed, and in one form.

The forms are those of the Responses API (openai/types/responses of OpenAI's Python SDK).
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mlx_parallm.api.turns.fields import BodyValue
from mlx_parallm.api.turns.images import detail_of
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_list

Item = dict[str, Any]
#: Finds a stored item by its id; None if there is none.
FindItem = Callable[[str], Item | None]

ROLES = ("user", "system", "developer", "assistant")
ID_BYTES = 16
# REASONING_SEAL, SUMMARY_SEAL: how texts begin that clients keep unread.
REASONING_SEAL = "mlx_parallm reasoning: "
SUMMARY_SEAL = "mlx_parallm summary: "
ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "compaction": "cmp",
    "compaction_trigger": "cmt",
}
# Items of tools that run on OpenAI's servers: no model here can use them.
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
#: ``TRIGGER``: the type of an item that asks for a summary in place of an answer.
TRIGGER = "compaction_trigger"
# CALLS, OUTPUTS: items of tools that run at the client.
CALLS = ("function_call", "custom_tool_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output")
#: ``IMAGE``: the type of a part that is an image.
IMAGE = "input_image"
NO_PARTS = "must be a text or a list of parts"
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def new_id(type_: str) -> str:
    """Return a fresh id of an item."""
    return f"{ID_PREFIXES[type_]}_{secrets.token_hex(ID_BYTES)}"


def sealed(text: str, seal: str = REASONING_SEAL) -> str:
    """Return a text as a client hands it back unread: base64, no secret."""
    return base64.urlsafe_b64encode(f"{seal}{text}".encode()).decode()


def unsealed(value: str, seal: str = REASONING_SEAL) -> str | None:
    """Return the text that ``sealed`` made this of; None if it is somebody else's."""
    try:
        text = base64.urlsafe_b64decode(value.encode()).decode()
    except (binascii.Error, ValueError):
        return None
    return text.removeprefix(seal) if text.startswith(seal) else None


def input_items(
    content: str | Sequence[Mapping[str, Any]], find: FindItem, *, where: str = "input"
) -> list[Item]:
    """Return the items of a body's field, each with an id; references become what they name.

    Raises:
        InvalidRequestError: one is malformed, or of a type that is not served; names its field, as
            ``input[3].content[0].type``.
    """
    if isinstance(content, str):
        message = BodyValue({"role": "user", "content": content}, where)
        return [_message(message)] if content else []
    items: list[Item] = []
    for item in BodyValue(content, where).entries():
        kind = item["type"].optional_text() or "message"
        if kind == "item_reference":
            items.append(_referred(item["id"], find))
        elif kind in _READERS:
            items.append(_READERS[kind](item))
        elif kind not in HOSTED:
            raise item["type"].refusal(f"{kind[:64]!r} is not served", unsupported=True)
    return items


def check_outputs(items: Iterable[Item], content: str | Sequence[Mapping[str, Any]]) -> None:
    """Refuse an output of a tool that no call came before.

    Args:
        items: of a conversation.
        content: the body's ``input``, where calls of hosted tools count too.

    Raises:
        InvalidRequestError: there is one.
    """
    raw: Sequence[Mapping[str, Any]] = () if isinstance(content, str) else content
    hosted = [item for item in raw if item.get("type") in tuple(HOSTED)]
    calls = {str(item.get("call_id") or item.get("id")) for item in hosted}
    for item in items:
        if item["type"] in CALLS:
            calls.add(item["call_id"])
        elif item["type"] in OUTPUTS and item["call_id"] not in calls:
            raise InvalidRequestError(
                f"No tool call found for the output with call_id {item['call_id'][:128]!r}.",
                param="input",
            )


def image_places(content: str | Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the places of the images of a body's checked ``input`` by their URLs.

    Equal images have the place of the first one.
    """
    places: dict[str, str] = {}
    for url, where in placed_images(content):
        places.setdefault(url, where)
    return places


def placed_images(content: str | Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return the URLs of the images of a body's checked ``input``, each with its place."""
    if isinstance(content, str):
        return []
    return [
        (url.value, url.where)
        for item in BodyValue(content, "input").entries()
        for value in (item["content"], item["output"])
        if is_list(value.value)
        for part in value.entries()
        if part.type == IMAGE and isinstance((url := part["image_url"]).value, str)
    ]


def _referred(id_: BodyValue, find: FindItem) -> Item:
    item = find(id_.text())
    if item is None:
        raise id_.refusal(f"{id_.text()[:128]!r} is no stored item")
    return item


def _message(item: BodyValue) -> Item:
    role, content, phase = item["role"], item["content"], item["phase"].value
    if role.value not in ROLES:
        raise role.refusal(f"must be one of {', '.join(ROLES)}")
    if isinstance(content.value, str):
        content = BodyValue([{"type": "text", "text": content.value}], content.where)
    parts = [_message_part(part, role.value) for part in content.entries(what=NO_PARTS)]
    head = _head(item, "message") | {"status": "completed", "role": role.value, "content": parts}
    return head | ({"phase": phase} if isinstance(phase, str) else {})


def _message_part(part: BodyValue, role: str) -> Item:
    if part.type == "refusal":
        return {"type": "refusal", "refusal": part["refusal"].text()}
    if part.type == IMAGE and role == "user":
        return _image(part)
    text = _part_text(part)
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": text}


def _image(part: BodyValue) -> Item:
    if part["file_id"].value is not None:
        raise part["file_id"].refusal("is not served; send image_url", unsupported=True)
    url = part["image_url"].filled_text()
    detail = detail_of(part["detail"].value, part["detail"].where)
    return {"type": IMAGE, "image_url": url, "detail": detail.value, "file_id": None}


def _part_text(part: BodyValue) -> str:
    if part.object().type not in TEXT_PARTS:
        raise part["type"].refusal(
            f"{str(part.type)[:64]!r} is not served here, only texts", unsupported=True
        )
    return part["text"].text()


def _function_call(item: BodyValue) -> Item:
    return _call(item) | {"arguments": item["arguments"].text()}


def _custom_call(item: BodyValue) -> Item:
    return _call(item) | {"input": item["input"].text()}


def _call(item: BodyValue) -> Item:
    call = _head(item, item.type) | {
        "status": "completed",
        "call_id": item["call_id"].filled_text(),
        "name": item["name"].filled_text(),
    }
    if item["namespace"].value is None:
        return call
    return call | {"namespace": item["namespace"].filled_text()}


def _output(item: BodyValue) -> Item:
    output = item["output"]
    text = output.value
    if not isinstance(text, str):
        parts = output.entries(what=NO_PARTS)
        text = [
            _image(part) if part.type == IMAGE else {"type": "input_text", "text": _part_text(part)}
            for part in parts
        ]
    return _head(item, item.type) | {
        "status": "completed",
        "call_id": item["call_id"].filled_text(),
        "output": text,
    }


def _reasoning(item: BodyValue) -> Item:
    secret = item["encrypted_content"].value
    return _head(item, "reasoning") | {
        "summary": _texts(item["summary"], "summary_text"),
        "content": _texts(item["content"], "reasoning_text"),
        "encrypted_content": secret if isinstance(secret, str) else None,
    }


def _compaction(item: BodyValue) -> Item:
    content = item["encrypted_content"]
    if unsealed(content.filled_text(), SUMMARY_SEAL) is None:
        raise content.refusal("is no summary of this server's")
    return _head(item, "compaction") | {"encrypted_content": content.value}


def _trigger(item: BodyValue) -> Item:
    return _head(item, TRIGGER)


def _texts(parts: BodyValue, type_: str) -> list[Item]:
    if parts.value is None:
        return []
    entries = parts.entries(what="must be a list of parts")
    return [{"type": type_, "text": _part_text(part)} for part in entries]


def _head(item: BodyValue, type_: str) -> Item:
    id_ = new_id(type_) if item["id"].value is None else item["id"].filled_text()
    return {"id": id_, "type": type_}


_READERS: Mapping[str, Callable[[BodyValue], Item]] = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _output,
    "custom_tool_call": _custom_call,
    "custom_tool_call_output": _output,
    "reasoning": _reasoning,
    "compaction": _compaction,
    TRIGGER: _trigger,
}
