"""From Anthropic's messages and content blocks to the messages of chat templates."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mlx_parallm.api.anthropic.contents import (
    BREAK,
    PLACE,
    USERS,
    Content,
    check_type,
    joined,
    result_content,
    server_result,
    texts_of,
)
from mlx_parallm.api.anthropic.schema import InputMessage
from mlx_parallm.api.turns.fields import BodyValue
from mlx_parallm.api.turns.history import SUMMARY

# Claude Code writes a hash of the request before its system prompt. It says nothing to a model, and
# no two prompts would begin alike (https://github.com/anthropics/claude-code/issues/68900).
BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")
# FORGETS: the key of a turn that takes the place of all before it but the system prompt.
FORGETS = "forgets"

_Block = Mapping[str, Any]


def conversation(
    system: str | Sequence[_Block], messages: Sequence[InputMessage]
) -> list[dict[str, Any]]:
    """Messages as ``TurnRequest`` takes them; neighbours of one role become one.

    A result of a tool becomes a message of the role tool; one that is an error begins with
    "Error: ". Redacted thinking, which cannot be read, is left out. A compaction's summary takes
    the place of the messages before it.

    Raises:
        InvalidRequestError: a block is malformed, or of a type that is not served; names it.
    """
    turns: list[dict[str, Any]] = []
    text = BREAK.join(_system_texts(BodyValue(system, "system")))
    if text:
        turns.append({"role": "system", "content": text})
    num_system = len(turns)
    names: dict[str, str] = {}
    for number, message in enumerate(messages):
        for turn in _turns(message, f"messages.{number}", names):
            if turn.pop(FORGETS, False):
                del turns[num_system:]
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
    last["content"] = joined(last["content"], turn["content"], between)
    if "reasoning_content" in turn:
        thoughts = (last.get("reasoning_content"), turn["reasoning_content"])
        last["reasoning_content"] = BREAK.join(text for text in thoughts if text)
    if "tool_calls" in turn:
        last["tool_calls"] = [*last.get("tool_calls", ()), *turn["tool_calls"]]


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
        check_type(block, readers)
        turn = readers[block.type](block, names)
        if turn is not None:
            yield {"role": message.role, "content": ""} | turn


def _content(block: BodyValue, names: dict[str, str]) -> dict[str, Any]:
    return {"content": USERS[block.type](block)}


def _thinking(block: BodyValue, names: dict[str, str]) -> dict[str, Any]:
    return {"reasoning_content": block["thinking"].text()}


def _left_out(block: BodyValue, names: dict[str, str]) -> None:
    return None


def _compaction(block: BodyValue, names: dict[str, str]) -> dict[str, Any] | None:
    """Return the summary as a turn of the user: templates begin with one. Null: it failed."""
    summary = block["content"].optional_text()
    if summary is None:
        return None
    return {"role": "user", "content": f"{SUMMARY}\n\n{summary}", FORGETS: True}


def _call(block: BodyValue, names: dict[str, str]) -> dict[str, Any]:
    id_ = block["id"].filled_text()
    names[id_] = name = block["name"].filled_text()
    function = {"name": name, "arguments": block["input"].object().value}
    return {"tool_calls": [{"id": id_, "type": "function", "function": function}]}


def _result(block: BodyValue, names: dict[str, str]) -> dict[str, Any]:
    start = "Error: " if block["is_error"].flag() else ""
    return _tool_turn(block, result_content(block["content"], start), names)


def _server_result(block: BodyValue, names: dict[str, str]) -> dict[str, Any]:
    return _tool_turn(block, server_result(block["content"]), names)


def _tool_turn(block: BodyValue, content: Content, names: dict[str, str]) -> dict[str, Any]:
    id_ = block["tool_use_id"].filled_text()
    turn = {"role": "tool", "tool_call_id": id_, "content": content}
    # Some templates ask whose result it is.
    return turn | {"name": names[id_]} if id_ in names else turn


def _system_texts(content: BodyValue) -> list[str]:
    texts = texts_of(content)
    kept = [text[match.end() :] if (match := BILLING.match(text)) else text for text in texts]
    return [text for text in kept if text]


_Reader = Callable[[BodyValue, dict[str, str]], dict[str, Any] | None]
# SERVER_TOOLS: tools that Anthropic runs within a turn of the assistant.
_SERVER_TOOLS = (
    "web_search",
    "web_fetch",
    "code_execution",
    "bash_code_execution",
    "text_editor_code_execution",
    "tool_search",
    "advisor",
)
_READERS: Mapping[str, Mapping[str, _Reader]] = {
    "user": {**dict.fromkeys(USERS, _content), "tool_result": _result},
    "assistant": {
        "text": _content,
        "thinking": _thinking,
        "redacted_thinking": _left_out,
        "tool_use": _call,
        "server_tool_use": _call,
        **{f"{tool}_tool_result": _server_result for tool in _SERVER_TOOLS},
        "mcp_tool_use": _call,
        "mcp_tool_result": _result,
        "compaction": _compaction,
        # Both are of Anthropic's own bookkeeping.
        "mcp_tool_listing": _left_out,
        "fallback": _left_out,
    },
}
