"""Checks of generated answers."""

from __future__ import annotations

import json
import re

from demo.example import Example, ToolCall

_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
_NUMBER = re.compile(r"-?\d+")


def visible(text: str) -> str:
    """Return the text after any thinking."""
    return text.rsplit("</think>", 1)[-1].lstrip("\n")


def parse_calls(text: str) -> list[ToolCall] | None:
    """Return the tool calls in a text; None if one of them is not valid JSON of the right form."""
    calls = []
    for body in _CALL.findall(text):
        try:
            call = json.loads(body)
        except json.JSONDecodeError:
            return None
        if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
            return None
        calls.append(ToolCall(call["name"], call["arguments"]))
    return calls


def is_right(example: Example, generated: str) -> bool:
    """Judges a generated turn (thinking included, end-of-turn token not) by the example's check."""
    text = visible(generated)
    if example.check == "calls":
        return parse_calls(text) == list(example.calls)
    if example.check == "json":
        return _same_json(text, example.answer)
    if example.check == "number":
        return _NUMBER.findall(text)[-1:] == _NUMBER.findall(example.answer)[-1:]
    if example.check == "contains":
        return all(part in text for part in example.expected)
    return text == example.answer


def is_valid_call(example: Example, generated: str) -> bool:
    """True if the calls parse, and name only tools on offer and parameters of these."""
    calls = parse_calls(visible(generated))
    if not calls:
        return False
    offered = {tool["function"]["name"]: tool["function"] for tool in example.tools}
    return all(
        call.name in offered
        and isinstance(call.arguments, dict)
        and set(call.arguments) <= set(offered[call.name]["parameters"]["properties"])
        for call in calls
    )


def _same_json(text: str, answer: str) -> bool:
    try:
        return json.loads(text) == json.loads(answer)
    except json.JSONDecodeError:
        return False
