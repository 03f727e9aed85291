"""From Anthropic's messages and content blocks to the messages of chat templates."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mlx_parallm.api.anthropic.schema import InputMessage
from mlx_parallm.types.errors import InvalidRequestError

# Between texts that a client keeps apart; the assistant's own are pieces of one.
BREAK = "\n\n"
# Claude Code writes a hash of the request before its system prompt. It says nothing to a model, and
# no two prompts would begin alike (https://github.com/anthropics/claude-code/issues/68900).
BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")

_Block = Mapping[str, Any]


def conversation(
    system: str | Sequence[_Block], messages: Sequence[InputMessage]
) -> list[dict[str, Any]]:
    """Messages as ``TurnRequest`` takes them; neighbours of one role become one.

    A result of a tool becomes a message of the role tool; one that is an error begins with
    "Error: ". Redacted thinking, which nobody can read, is left out.

    Raises:
        InvalidRequestError: a block is malformed, or of a type that is not served; names it.
    """
    turns: list[dict[str, Any]] = []
    text = BREAK.join(_system_texts(system, "system"))
    if text:
        turns.append({"role": "system", "content": text})
    names: dict[str, str] = {}
    for number, message in enumerate(messages):
        for turn in _turns(message, f"messages.{number}.content", names):
            _append(turns, turn)
    return turns


def is_continued(turns: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the answer goes on with the assistant's last message.

    Raises:
        InvalidRequestError: that message has calls without results, or no text to go on with.
    """
    if not turns or turns[-1]["role"] != "assistant":
        return False
    if "tool_calls" in turns[-1]:
        raise _refusal("messages", "ends with a tool_use that has no tool_result")
    if not turns[-1]["content"]:
        raise _refusal("messages", "ends with thinking that no text follows")
    return True


def _append(turns: list[dict[str, Any]], turn: dict[str, Any]) -> None:
    """Add a turn, or join it to the last one, as Anthropic does with turns of one role."""
    if not turns or turns[-1]["role"] != turn["role"] or turn["role"] == "tool":
        turns.append(turn)
        return
    last = turns[-1]
    between = "" if turn["role"] == "assistant" else BREAK
    last["content"] = between.join(text for text in (last["content"], turn["content"]) if text)
    if "reasoning_content" in turn:
        thoughts = (last.get("reasoning_content"), turn["reasoning_content"])
        last["reasoning_content"] = BREAK.join(text for text in thoughts if text)
    if "tool_calls" in turn:
        last["tool_calls"] = [*last.get("tool_calls", ()), *turn["tool_calls"]]


def _turns(message: InputMessage, where: str, names: dict[str, str]) -> Iterator[dict[str, Any]]:
    """A message as turns of one block each; ``names`` has the tools' by the ids of their calls."""
    content = message.content
    if message.role == "system":
        yield {"role": "system", "content": BREAK.join(_system_texts(content, where))}
        return
    if not content and message.role == "user":
        raise _refusal(where, "must not be empty")
    if isinstance(content, str):
        # An empty last message of the assistant is one that has yet to begin.
        yield from [{"role": message.role, "content": content}] if content else []
        return
    read = _READERS[message.role]
    for number, block in enumerate(content):
        place = f"{where}.{number}"
        type_ = block.get("type")
        if not isinstance(type_, str) or type_ not in read:
            raise _unsupported(place, type_, tuple(read))
        turn = read[type_](block, place, names)
        if turn is not None:
            yield {"role": message.role, "content": ""} | turn


def _text(block: _Block, where: str, names: dict[str, str]) -> dict[str, Any]:
    return {"content": _string(block.get("text"), f"{where}.text")}


def _thinking(block: _Block, where: str, names: dict[str, str]) -> dict[str, Any]:
    return {"reasoning_content": _string(block.get("thinking"), f"{where}.thinking")}


def _redacted(block: _Block, where: str, names: dict[str, str]) -> None:
    return None


def _call(block: _Block, where: str, names: dict[str, str]) -> dict[str, Any]:
    id_ = _filled(block.get("id"), f"{where}.id")
    names[id_] = name = _filled(block.get("name"), f"{where}.name")
    arguments = block.get("input")
    if not isinstance(arguments, Mapping):
        raise _refusal(f"{where}.input", "must be an object")
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"id": id_, "type": "function", "function": function}]}


def _result(block: _Block, where: str, names: dict[str, str]) -> dict[str, Any]:
    id_ = _filled(block.get("tool_use_id"), f"{where}.tool_use_id")
    is_error = block.get("is_error")
    if not isinstance(is_error, bool | None):
        raise _refusal(f"{where}.is_error", "must be true or false")
    text = BREAK.join(_texts(block.get("content") or "", f"{where}.content"))
    turn = {"role": "tool", "tool_call_id": id_, "content": f"Error: {text}" if is_error else text}
    # Some templates ask whose result it is.
    return turn | {"name": names[id_]} if id_ in names else turn


def _system_texts(content: Any, where: str) -> list[str]:
    texts = _texts(content, where)
    kept = [text[match.end() :] if (match := BILLING.match(text)) else text for text in texts]
    return [text for text in kept if text]


def _texts(content: Any, where: str) -> list[str]:
    """A text, or those of blocks that are all of type text."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise _refusal(where, "must be a text or a list of blocks")
    texts = []
    for number, block in enumerate(content):
        place = f"{where}.{number}"
        type_ = block.get("type") if isinstance(block, Mapping) else None
        if type_ != "text":
            raise _unsupported(place, type_, ("text",))
        texts.append(_string(block.get("text"), f"{place}.text"))
    return texts


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _refusal(where, "must be a text")
    return value


def _filled(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise _refusal(where, "must be a text that is not empty")
    return value


def _unsupported(where: str, type_: Any, known: Sequence[str]) -> InvalidRequestError:
    told = f"of type {type_[:64]!r} is" if isinstance(type_, str) else "without a type is"
    return InvalidRequestError(
        f"{where}: a block {told} not supported here, only {', '.join(known)}.",
        param=where,
        code="unsupported_parameter",
    )


def _refusal(param: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} {why}.", param=param)


_Reader = Callable[[_Block, str, dict[str, str]], dict[str, Any] | None]
_READERS: Mapping[str, Mapping[str, _Reader]] = {
    "user": {"text": _text, "tool_result": _result},
    "assistant": {
        "text": _text,
        "thinking": _thinking,
        "redacted_thinking": _redacted,
        "tool_use": _call,
    },
}
