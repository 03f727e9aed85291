"""The text that a question is asked with, and the labels it is answered by.

The input comes first and the question after it, so that all questions of a request share a prefix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from mlx_parallm.api.decisions.schema import ChoiceQuestion, PredicateQuestion, ScoreQuestion
from mlx_parallm.types.errors import InvalidRequestError

TASK = "Read the input, then answer the question about it with one label and nothing else."
# What the answer begins with; a label follows after a space.
ANSWER = "Answer:"
# Between what questions share and what is each one's own.
END_OF_INPUT = "</input>\n\n"

CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
OUTPUTS = ("function_call_output", "custom_tool_call_output")
ROLES = ("user", "developer", "system", "assistant")
TEXT_PARTS = {"input_text": "text", "output_text": "text", "refusal": "refusal", "text": "text"}


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """A question as the model sees it.

    Attributes:
        text: what stands after the input.
        labels: what it may be answered with, in the order of the options.
    """

    text: str
    labels: tuple[str, ...]


def ask_predicate(question: PredicateQuestion, param: str) -> AskedQuestion:
    """Yes or no."""
    statement = _text_of(question.instructions, param)
    return AskedQuestion(
        f"Statement: {statement}\nIs the statement true of the input? Labels:\nYes\nNo",
        ("Yes", "No"),
    )


def ask_choice(question: ChoiceQuestion, param: str) -> AskedQuestion:
    """A letter per option; numbers of three digits where there are too few letters."""
    values = [(type(one.value), one.value) for one in question.choices]
    if len(set(values)) < len(values):
        raise InvalidRequestError(f"{param}.choices has a value twice.", param="questions")
    count = len(values)
    labels = tuple(ascii_uppercase[:count]) if count <= len(ascii_uppercase) else _numbers(count)
    options = [
        f"{label}: {_shown(one.value)}{_described(one.description)}"
        for label, one in zip(labels, question.choices, strict=True)
    ]
    asked = _text_of(question.instructions, param)
    return AskedQuestion(f"Question: {asked}\nLabels:\n" + "\n".join(options), labels)


def ask_score(question: ScoreQuestion, param: str) -> AskedQuestion:
    """A number per level, from 0."""
    count = len(question.levels)
    labels = tuple(map(str, range(count))) if count <= 10 else _numbers(count)
    levels = [
        f"{label}: {one.label}{_described(one.description)}"
        for label, one in zip(labels, question.levels, strict=True)
    ]
    asked = _text_of(question.instructions, param)
    text = f"Question: {asked}\nLabels, from the lowest level to the highest:\n"
    return AskedQuestion(text + "\n".join(levels), labels)


def input_text(given: str | Sequence[Mapping[str, Any]]) -> str:
    """The input as text: one paragraph per message, call or output.

    Raises:
        InvalidRequestError: an item has an unknown type or role, holds no text, or is the output of
            a call that is not there.
    """
    if isinstance(given, str):
        return given
    calls: set[str] = set()
    return "\n\n".join(_item(item, f"input[{i}]", calls) for i, item in enumerate(given))


def _item(item: Mapping[str, Any], where: str, calls: set[str]) -> str:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in ROLES:
            raise _bad(f"{where}.role must be one of {', '.join(ROLES)}.")
        return f"{role}: {_text_of(item.get('content'), where, 'input')}"
    call_id = item.get("call_id")
    if not isinstance(call_id, str):
        raise _bad(f"{where}.call_id must be a text.")
    if kind in CALLS:
        calls.add(call_id)
        name, value = item.get("name"), item.get(CALLS[kind])
        if not isinstance(name, str) or not isinstance(value, str):
            raise _bad(f"{where}: name and {CALLS[kind]} must be texts.")
        return f"call of {name}: {value}"
    if kind not in OUTPUTS:
        raise _bad(f"{where}.type {str(kind)[:32]!r} is unknown.")
    if call_id not in calls:
        raise _bad(f"{where} is the output of a call that is not before it.")
    return f"output: {_text_of(item.get('output'), where, 'input')}"


def _text_of(content: Any, where: str, param: str = "questions") -> str:
    """A text, or the texts of parts one after the other."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _bad(f"{where} must have a text or a list of parts.", param)
    return "\n".join(_part(part, where, param) for part in content)


def _part(part: Any, where: str, param: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "input_json" and isinstance(part.get("data"), dict | list):
        return json.dumps(part["data"], ensure_ascii=False, separators=(",", ":"))
    text = part.get(TEXT_PARTS[kind]) if isinstance(kind, str) and kind in TEXT_PARTS else None
    if not isinstance(text, str):
        raise _bad(f"{where}: only parts of type input_text and input_json are supported.", param)
    return text


def _bad(message: str, param: str = "input") -> InvalidRequestError:
    return InvalidRequestError(message, param=param)


def _shown(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


def _described(description: str | None) -> str:
    return f" ({description})" if description else ""


def _numbers(count: int) -> tuple[str, ...]:
    # Of one length, so that none begins another.
    return tuple(f"{number:03}" for number in range(count))
