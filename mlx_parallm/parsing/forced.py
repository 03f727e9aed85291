"""The grammar of a turn that must be tool calls, and the format to read it with."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_parallm.parsing.families.json_array import JSON_ARRAY
from mlx_parallm.parsing.formats import CallText, Tool, ToolFormat, tools_of
from mlx_parallm.types.errors import InvalidRequestError

# As chat templates write JSON; free white space would let a bad model go on for ever.
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Keywords beside which an object's other properties may be named elsewhere.
_COMPOSED = ("$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties", "unevaluatedProperties")


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """A turn of tool calls: what its text must match, and how that text is written.

    Attributes:
        grammar: llguidance's Lark text.
        tool_format: what reads it.
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
    """What makes even a random model call a tool, with arguments of the tool's schema.

    Args:
        tool_format: the model's own format; where that cannot be forced, or there is none, calls
            are a plain JSON array.
        tools: the request's tools, as the chat API writes them.
        parallel: whether there may be several calls.
        named: the one tool that may be called; None: any.
        special_tokens: ids of the vocabulary's special tokens, which no text spells.

    Raises:
        InvalidRequestError: there is no tool, or none of that name.
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
    """The schema of a tool's arguments as it is enforced: always an object.

    Properties that the schema does not name are left out, unless it says otherwise.
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
    more = ""
    if parallel and text.separator is not None:
        more = f" ({spell.text(text.separator)} call)*"
    start = " ".join([spell.text(text.begin), f"call{more}", spell.text(text.end)])
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
    """Writes text in Lark; special tokens by their ids."""

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
