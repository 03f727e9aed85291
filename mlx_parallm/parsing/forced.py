"""Grammars that force a turn to be tool calls, and the format that reads such a turn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlx_parallm.parsing.families.json_array import JSON_ARRAY
from mlx_parallm.parsing.families.pythonic import LFM2, LLAMA4_PYTHONIC, OLMO3, PYTHONIC
from mlx_parallm.parsing.formats import CallText, Tool, ToolFormat, tools_of
from mlx_parallm.types.errors import InvalidRequestError

# _WRITTEN: JSON is spaced as chat templates do; with free white space a model could fill the turn.
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# _COMPOSED: schema keywords that can declare an object's properties outside "properties".
_COMPOSED = ("$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties", "unevaluatedProperties")
#: ``WriteCalls``: returns calls, each a name and its arguments, as text. It can be pickled.
WriteCalls = Callable[[Sequence[tuple[str, Mapping[str, Any]]]], str]

# _PYTHONIC: what is before and after calls in the formats of Python's notation.
_PYTHONIC = {
    PYTHONIC.name: ("[", "]"),
    LLAMA4_PYTHONIC.name: ("<|python_start|>[", "]<|python_end|>"),
    LFM2.name: ("<|tool_call_start|>[", "]<|tool_call_end|>"),
    OLMO3.name: ("<function_calls>", "</function_calls>"),
}


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """A turn that must be tool calls: the grammar of its text, and the format that reads it.

    Attributes:
        grammar: llguidance's Lark text.
        tool_format: the format that reads the text.
    """

    grammar: str
    tool_format: ToolFormat


def forced_calls(
    tool_format: ToolFormat | None,
    tools: Sequence[Mapping[str, Any]],
    *,
    parallel: bool,
    named: str | None = None,
    special_tokens: Mapping[str, int] | None = None,
) -> ForcedCalls:
    """Return a grammar that forces tool calls with arguments of the tools' schemas.

    Args:
        tool_format: the model's own format; if it is None or cannot be forced, calls are a plain
            JSON array.
        tools: the request's tools, in the chat API's form.
        parallel: allow several calls.
        named: the only tool that may be called; None: any.
        special_tokens: ids of the vocabulary's special tokens, which the grammar names by id.

    Raises:
        InvalidRequestError: there is no tool, or no tool of that name.
    """
    callable_tools = [tool for tool in tools_of(tools) if named in (None, tool.name)]
    if not callable_tools:
        message = "tool_choice needs a tool." if named is None else f"There is no tool {named!r}."
        raise InvalidRequestError(message, param="tool_choice")
    form = tool_format if tool_format is not None and tool_format.forced else JSON_ARRAY
    assert form.forced is not None
    grammar = _grammar(form.forced, callable_tools, parallel, special_tokens or {})
    return ForcedCalls(grammar, form)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments as the grammar enforces it: always an object.

    Properties that the schema does not name are forbidden, unless it allows them. The grammar's
    compiler rewrites it, off the event loop.
    """
    schema = {**tool.parameters, "type": "object"}
    if "properties" in schema and not any(key in schema for key in _COMPOSED):
        schema.setdefault("additionalProperties", False)
    schema["x-guidance"] = _WRITTEN if tool.strict else {**_WRITTEN, "lenient": True}
    return schema


def _grammar(
    text: CallText, tools: Sequence[Tool], parallel: bool, special_tokens: Mapping[str, int]
) -> str:
    spell = _Speller(special_tokens)
    more_calls = ""
    if parallel and text.separator is not None:
        more_calls = f" ({spell.text(text.separator)} call)*"
    start = " ".join([spell.text(text.begin), f"call{more_calls}", spell.text(text.end)])
    lines = [
        f'start: "\\n\\n"? {start}',
        "call: " + " | ".join(f"call_{number}" for number in range(len(tools))),
    ]
    for number, tool in enumerate(tools):
        before, _, after = text.call.replace("$name", tool.name).partition("$arguments")
        lines += [
            f"call_{number}: {spell.text(before)} arguments_{number} {spell.text(after)}",
            f"arguments_{number}: %json {json.dumps(arguments_schema(tool))}",
        ]
    return "\n".join(lines)


class _Speller:
    """Writes literal text in Lark, with special tokens as ids."""

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._ids = special_tokens
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def text(self, text: str) -> str:
        pieces = self._pattern.split(text) if self._ids else [text]
        return " ".join(self._piece(piece) for piece in pieces if piece)

    def _piece(self, piece: str) -> str:
        token_id = self._ids.get(piece)
        return json.dumps(piece) if token_id is None else f"<[{token_id}]>"


def call_writer(form: ToolFormat | None) -> WriteCalls:
    """Return what writes calls in a format, or as a plain JSON array if that has no text form."""
    if form is not None and form.name in _PYTHONIC:
        return partial(_in_python, *_PYTHONIC[form.name])
    own = form.forced if form is not None else None
    text = own or JSON_ARRAY.forced
    assert text is not None, "the plain array can be forced"
    return partial(_in_json, text)


def _in_json(text: CallText, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    written: list[str] = []
    for name, arguments in calls:
        before, _, after = text.call.partition("$arguments")
        value = json.dumps(arguments, ensure_ascii=False)
        written.append(before.replace("$name", name) + value + after.replace("$name", name))
    return text.begin + (text.separator or "\n").join(written) + text.end


def _in_python(begin: str, end: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    written = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]
    return begin + ", ".join(written) + end
