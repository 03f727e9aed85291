"""Tools that a turn may call, and which of them it may or must call."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from mlx_parallm.types.errors import InvalidRequestError

# OpenAI allows 64 characters and no dots; names of MCP servers' tools are often longer.
TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
# OpenAI's limit is 128; agents with several MCP servers have more.
MAX_TOOLS = 512
# What a custom tool takes, as a function: its text is the argument of this name.
CUSTOM_INPUT = "input"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: of ``TOOL_NAME``.
        description: for the model; None for none.
        parameters: JSON schema of the arguments, which are an object.
        strict: whether the caller wants arguments that match ``parameters`` exactly.
        is_custom: it takes a text, not arguments: the argument ``CUSTOM_INPUT`` is that text.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    is_custom: bool = False

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it: OpenAI's function tool."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters)
        return {"type": "function", "function": function}


class ToolMode(StrEnum):
    """Whether tools are called."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """What the caller wants called.

    Attributes:
        mode: none: no tool; auto: the model decides; required: at least one.
        names: only these may be called; None for any.
        is_named: the caller named the one function to call. OpenAI and vLLM then report the finish
            reason "stop", not "tool_calls".
    """

    mode: ToolMode = ToolMode.AUTO
    names: tuple[str, ...] | None = None
    is_named: bool = False

    @staticmethod
    def named(name: str) -> ToolChoice:
        """Exactly this function."""
        return ToolChoice(mode=ToolMode.REQUIRED, names=(name,), is_named=True)


def function_tool(
    name: Any,
    *,
    description: Any = None,
    parameters: Any = None,
    strict: Any = None,
    where: str,
    schema_field: str = "parameters",
) -> Tool:
    """A function tool of unchecked JSON values; ``where`` is its place in the body.

    Raises:
        InvalidRequestError: one of them is malformed; names its field, as ``tools[3].name``.
    """
    _check_name(name, where)
    if description is not None and not isinstance(description, str):
        raise _refusal(f"{where}.description", "must be a text")
    if strict is not None and not isinstance(strict, bool):
        raise _refusal(f"{where}.strict", "must be true or false")
    return Tool(
        name=name,
        description=description,
        parameters=_object_schema(parameters, f"{where}.{schema_field}"),
        strict=bool(strict),
    )


def custom_tool(name: Any, *, description: Any = None, format_: Any = None, where: str) -> Tool:
    """A custom tool, which takes a text, of unchecked JSON values.

    A grammar in its format is told to the model as part of the description.

    Raises:
        InvalidRequestError: one of them is malformed; names its field.
    """
    if format_ is not None and not isinstance(format_, Mapping):
        raise _refusal(f"{where}.format", "must be an object")
    tool = function_tool(name, description=description, where=where)
    words = [tool.description] if tool.description else []
    grammar = _grammar_text(format_ or {})
    if grammar:
        words.append(f"The input must match this grammar:\n{grammar}")
    return Tool(
        name=tool.name,
        description="\n\n".join(words) or None,
        parameters={
            "type": "object",
            "properties": {CUSTOM_INPUT: {"type": "string"}},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        },
        is_custom=True,
    )


def check_tools(tools: Sequence[Tool], field_of: Sequence[str]) -> None:
    """Refuse too many tools, or two of one name; ``field_of`` are their places in the body.

    Raises:
        InvalidRequestError: names the field.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(f"At most {MAX_TOOLS} tools.", param="tools")
    seen: set[str] = set()
    for tool, where in zip(tools, field_of, strict=True):
        if tool.name in seen:
            raise _refusal(f"{where}.name", f"{tool.name!r} is the name of another tool too")
        seen.add(tool.name)


def check_choice(choice: ToolChoice, tools: Sequence[Tool], *, field: str = "tool_choice") -> None:
    """Refuse a choice that the tools cannot meet.

    Raises:
        InvalidRequestError: a tool must be called but there is none, or a name is no tool's.
    """
    names = {tool.name for tool in tools}
    unknown = [name for name in choice.names or () if name not in names]
    if unknown:
        raise _refusal(field, f"names {unknown[0][:128]!r}, which is not among the tools")
    if choice.mode is ToolMode.REQUIRED and (not tools or choice.names == ()):
        raise _refusal(field, "wants a tool called, but there is none")


def callable_tools(tools: Iterable[Tool], choice: ToolChoice) -> tuple[Tool, ...]:
    """The tools that may be called."""
    if choice.mode is ToolMode.NONE:
        return ()
    return tuple(tool for tool in tools if choice.names is None or tool.name in choice.names)


def _check_name(name: Any, where: str) -> None:
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise _refusal(f"{where}.name", "must be 1 to 128 of letters, digits, _ . and -")


def _object_schema(parameters: Any, where: str) -> dict[str, Any]:
    """The schema, which is that of an object even where it does not say so."""
    if parameters is None:
        return {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise _refusal(where, "must be a JSON schema")
    if parameters.get("type", "object") != "object":
        raise _refusal(where, 'must be a JSON schema of type "object"')
    return {"type": "object"} | dict(parameters)


def _grammar_text(format_: Mapping[str, Any]) -> str:
    grammar = format_.get("grammar", format_)
    definition = grammar.get("definition") if isinstance(grammar, Mapping) else None
    return definition if isinstance(definition, str) else ""


def _refusal(param: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} {why}.", param=param)
