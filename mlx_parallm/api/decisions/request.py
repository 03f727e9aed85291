"""The text that a question is asked with, and the labels it is answered by.

The input comes first and the question after it, so that all questions of a request share a prefix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase, digits
from typing import Any

from mlx_parallm.api.decisions.schema import (
    ChoiceQuestion,
    PredicateQuestion,
    ScoreQuestion,
)
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_list, is_object

TASK = "Read the input, then answer the question about it with one label and nothing else."
# What the answer begins with; a label follows after a space.
ANSWER = "Answer:"
# Between what questions share and what is each one's own.
END_OF_INPUT = "</input>\n\n"

TypedQuestion = PredicateQuestion | ChoiceQuestion | ScoreQuestion

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


def ask(question: TypedQuestion, number: int) -> AskedQuestion:
    """Return a question as the model sees it.

    The labels of choices are letters, those of levels numbers from 0; where there are too many,
    numbers of three digits.

    Raises:
        InvalidRequestError: its instructions hold no text, or two of its choices are equal.
    """
    param = f"questions[{number}]"
    instructions = _text_of(question.instructions, param)
    match question:
        case PredicateQuestion():
            text = (
                f"Statement: {instructions}\nIs the statement true of the input? Labels:\nYes\nNo"
            )
            return AskedQuestion(text, ("Yes", "No"))
        case ChoiceQuestion(choices=options):
            if len({(type(option.value), option.value) for option in options}) < len(options):
                raise InvalidRequestError(f"{param}.choices has a value twice.", param="questions")
            names = [_shown(option.value) for option in options]
            head, short_labels = "Labels:", ascii_uppercase
        case ScoreQuestion(levels=options):
            names = [option.label for option in options]
            head, short_labels = "Labels, from the lowest level to the highest:", digits
    labels = tuple(short_labels[: len(options)])
    if len(labels) < len(options):
        # All of one length, so that none begins another.
        labels = tuple(f"{place:03}" for place in range(len(options)))
    lines = [
        f"{label}: {name}" + (f" ({option.description})" if option.description else "")
        for label, name, option in zip(labels, names, options, strict=True)
    ]
    return AskedQuestion("\n".join([f"Question: {instructions}", head, *lines]), labels)


def input_text(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the input as text: one paragraph per message, call or output.

    Raises:
        InvalidRequestError: an item has an unknown type or role, holds no text, or is the output of
            a call that is not there.
    """
    if isinstance(content, str):
        return content
    calls: set[str] = set()
    return "\n\n".join(_item(item, f"input[{i}]", calls) for i, item in enumerate(content))


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
    """Return a text, or the texts of parts one after the other."""
    if isinstance(content, str):
        return content
    if not is_list(content):
        raise _bad(f"{where} must have a text or a list of parts.", param)
    return "\n".join(_part(part, where, param) for part in content)


def _part(part: Any, where: str, param: str) -> str:
    fields = part if is_object(part) else {}
    kind = fields.get("type")
    if kind == "input_json" and isinstance(fields.get("data"), dict | list):
        return json.dumps(fields["data"], ensure_ascii=False, separators=(",", ":"))
    text = fields.get(TEXT_PARTS[kind]) if isinstance(kind, str) and kind in TEXT_PARTS else None
    if not isinstance(text, str):
        raise _bad(f"{where}: only parts of type input_text and input_json are supported.", param)
    return text


def _bad(message: str, param: str = "input") -> InvalidRequestError:
    return InvalidRequestError(message, param=param)


def _shown(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()
