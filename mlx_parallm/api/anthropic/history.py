"""From Anthropic's messages and content blocks to the messages of chat templates."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from mlx_parallm.api.anthropic.schema import InputMessage
from mlx_parallm.api.turns.fields import BodyValue
from mlx_parallm.api.turns.images import ImageSource, image_part
from mlx_parallm.types.errors import InvalidRequestError

# Between texts that a client keeps apart; the assistant's own are pieces of one.
BREAK = "\n\n"
# Claude Code writes a hash of the request before its system prompt. It says nothing to a model, and
# no two prompts would begin alike (https://github.com/anthropics/claude-code/issues/68900).
BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")

# How the place of an entry of a list is written.
PLACE = "{where}.{number}"

_Block = Mapping[str, Any]
#: ``Content``: of a message: a text, or parts if there are images.
Content = str | list[dict[str, Any]]


def conversation(
    system: str | Sequence[_Block], messages: Sequence[InputMessage]
) -> list[dict[str, Any]]:
    """Messages as ``TurnRequest`` takes them; neighbours of one role become one.

    A result of a tool becomes a message of the role tool; one that is an error begins with
    "Error: ". Redacted thinking, which cannot be read, is left out.

    Raises:
        InvalidRequestError: a block is malformed, or of a type that is not served; names it.
    """
    turns: list[dict[str, Any]] = []
    text = BREAK.join(_system_texts(BodyValue(system, "system")))
    if text:
        turns.append({"role": "system", "content": text})
    names: dict[str, str] = {}
    for number, message in enumerate(messages):
        for turn in _turns(message, f"messages.{number}", names):
            _append(turns, turn)
    return turns


def is_continued(turns: Sequence[Mapping[str, Any]]) -> bool:
    """True if the answer goes on with the assistant's last message.

    Raises:
        InvalidRequestError: that message has calls without results, or no text to go on with.
    """
    if not turns or turns[-1]["role"] != "assistant":
        return False
    body = BodyValue(turns, "messages")
    if "tool_calls" in turns[-1]:
        raise body.refusal("ends with a tool_use that has no tool_result")
    if not turns[-1]["content"]:
        raise body.refusal("ends with thinking that no text follows")
    return True


def _append(turns: list[dict[str, Any]], turn: dict[str, Any]) -> None:
    """Add a turn, or join it to the last one, as Anthropic does with turns of one role."""
    if not turns or turns[-1]["role"] != turn["role"] or turn["role"] == "tool":
        turns.append(turn)
        return
    last = turns[-1]
    between = "" if turn["role"] == "assistant" else BREAK
    last["content"] = _joined(last["content"], turn["content"], between)
    if "reasoning_content" in turn:
        thoughts = (last.get("reasoning_content"), turn["reasoning_content"])
        last["reasoning_content"] = BREAK.join(text for text in thoughts if text)
    if "tool_calls" in turn:
        last["tool_calls"] = [*last.get("tool_calls", ()), *turn["tool_calls"]]


def _joined(first: Content, second: Content, between: str) -> Content:
    """Return two contents as one: a text, or parts if there are images."""
    if isinstance(first, str) and isinstance(second, str):
        return between.join(text for text in (first, second) if text)
    return [*_parts(first), *_parts(second)]


def _parts(content: Content) -> list[dict[str, Any]]:
    if not isinstance(content, str):
        return content
    return [{"type": "text", "text": content}] if content else []


def _turns(message: InputMessage, where: str, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield a message as turns of one block each; ``names`` has the tools' by their calls' ids."""
    content = BodyValue(message.content, f"{where}.content")
    if message.role == "system":
        yield {"role": "system", "content": BREAK.join(_system_texts(content))}
        return
    if not message.content and message.role == "user":
        raise content.refusal("must not be empty")
    if isinstance(message.content, str):
        # An empty last message of the assistant is one that has yet to begin.
        if message.content:
            yield {"role": message.role, "content": message.content}
        return
    readers = _READERS[message.role]
    for block in content.entries(form=PLACE):
        _check_type(block, readers)
        turn = readers[block.type](block, names)
        if turn is not None:
            yield {"role": message.role, "content": ""} | turn


def _text(block: BodyValue, names: dict[str, str]) -> dict[str, Any]:
    return {"content": block["text"].text()}


def _image(block: BodyValue, names: dict[str, str]) -> dict[str, Any]:
    source = block["source"].object()
    if source.type == "base64":
        media_type, data = source["media_type"].filled_text(), source["data"].filled_text()
        image = ImageSource(param=source.where, url=data, is_base64=True, media_type=media_type)
    elif source.type == "url":
        image = ImageSource(param=source.where, url=source["url"].filled_text())
    else:
        raise source["type"].refusal("must be base64 or url")
    return {"content": [image_part(image)]}


def _thinking(block: BodyValue, names: dict[str, str]) -> dict[str, Any]:
    return {"reasoning_content": block["thinking"].text()}


def _redacted(block: BodyValue, names: dict[str, str]) -> None:
    return None


def _call(block: BodyValue, names: dict[str, str]) -> dict[str, Any]:
    id_ = block["id"].filled_text()
    names[id_] = name = block["name"].filled_text()
    function = {"name": name, "arguments": block["input"].object().value}
    return {"tool_calls": [{"id": id_, "type": "function", "function": function}]}


def _result(block: BodyValue, names: dict[str, str]) -> dict[str, Any]:
    id_ = block["tool_use_id"].filled_text()
    start = "Error: " if block["is_error"].flag() else ""
    content = block["content"]
    turn = {"role": "tool", "tool_call_id": id_, "content": _result_content(content, start)}
    # Some templates ask whose result it is.
    return turn | {"name": names[id_]} if id_ in names else turn


def _result_content(content: BodyValue, start: str) -> Content:
    """Return the texts and images of a tool's result behind ``start``."""
    if not content.value or isinstance(content.value, str):
        return start + (content.value or "")
    blocks = content.entries(form=PLACE, what="must be a text or a list of blocks")
    for block in blocks:
        _check_type(block, _RESULT_READERS)
    contents: list[Content] = [
        _RESULT_READERS[block.type](block, {})["content"] for block in blocks
    ]
    texts = [each for each in contents if isinstance(each, str)]
    if len(texts) == len(contents):
        return start + BREAK.join(texts)
    return [part for each in (start, *contents) for part in _parts(each)]


def _system_texts(content: BodyValue) -> list[str]:
    texts = _texts(content)
    kept = [text[match.end() :] if (match := BILLING.match(text)) else text for text in texts]
    return [text for text in kept if text]


def _texts(content: BodyValue) -> list[str]:
    """Return a text, or those of blocks that are all of type text."""
    if isinstance(content.value, str):
        return [content.value]
    blocks = content.entries(form=PLACE, what="must be a text or a list of blocks")
    for block in blocks:
        _check_type(block, ("text",))
    return [block["text"].text() for block in blocks]


def _check_type(block: BodyValue, known: Collection[str]) -> None:
    """Refuse a block whose type is not among those known here."""
    if isinstance(block.type, str) and block.type in known:
        return
    kind = f"of type {block.type[:64]!r}" if isinstance(block.type, str) else "without a type"
    raise InvalidRequestError(
        f"{block.where}: a block {kind} is not supported here, only {', '.join(known)}.",
        param=block.where,
        code="unsupported_parameter",
    )


_Reader = Callable[[BodyValue, dict[str, str]], dict[str, Any] | None]
_RESULT_READERS: Mapping[str, Callable[[BodyValue, dict[str, str]], dict[str, Any]]] = {
    "text": _text,
    "image": _image,
}
_READERS: Mapping[str, Mapping[str, _Reader]] = {
    "user": {"text": _text, "image": _image, "tool_result": _result},
    "assistant": {
        "text": _text,
        "thinking": _thinking,
        "redacted_thinking": _redacted,
        "tool_use": _call,
    },
}
