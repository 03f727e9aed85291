"""Tools that a turn may call, and which of them it may or must call."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from mlx_parallm.api.turns.fields import BodyValue
from mlx_parallm.grammar.lark_regex import lark_regex
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_mapping

# OpenAI allows 64 characters and no dots; names of MCP servers' tools are often longer.
TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
# OpenAI's limit is 128; agents with several MCP servers have more.
MAX_TOOLS = 512
# The types of tools that clients run.
TOOL_TYPES = ("function", "custom")
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
        pattern: of a custom tool: an expression that the whole text must match; None for any text.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])
    strict: bool = False
    is_custom: bool = False
    pattern: str | None = None

    def enforced(self) -> Mapping[str, Any]:
        """Return the schema of the arguments, with the pattern that the description asks for."""
        if self.pattern is None:
            return self.parameters
        text = {"type": "string", "pattern": f"^(?:{self.pattern})$"}
        return {**self.parameters, "properties": {CUSTOM_INPUT: text}}

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates take it: OpenAI's function tool."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters)
        return {"type": "function", "function": function}


class ToolMode(StrEnum):
    """Modes of a tool choice."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """The caller's choice among the tools.

    Attributes:
        mode: none: no tool; auto: the model decides; required: at least one.
        names: only these may be called; None for any.
        is_named: the caller named the one function to call. OpenAI and vLLM then report the finish
            reason "stop", not "tool_calls".
        param: the field of the body that has the choice.
    """

    mode: ToolMode = ToolMode.AUTO
    names: tuple[str, ...] | None = None
    is_named: bool = False
    param: str = field(default="tool_choice", compare=False)

    @staticmethod
    def named(name: str) -> ToolChoice:
        """Exactly this function."""
        return ToolChoice(mode=ToolMode.REQUIRED, names=(name,), is_named=True)


def function_tool(tool: BodyValue, *, schema_field: str = "parameters") -> Tool:
    """Return the function tool that an object describes.

    Raises:
        InvalidRequestError: it is malformed; names the field, as ``tools[3].name``.
    """
    return Tool(
        name=tool_name(tool["name"]),
        description=tool["description"].optional_text(),
        parameters=_object_schema(tool[schema_field]),
        strict=tool["strict"].flag(),
    )


def custom_tool(tool: BodyValue) -> Tool:
    """Return the custom tool, which takes a text, that an object describes.

    A grammar in its format becomes part of the description, and is enforced.

    Raises:
        InvalidRequestError: it is malformed; names the field.
    """
    description = tool["description"].optional_text()
    grammar, pattern = _grammar(tool["format"])
    words = [description, grammar and f"The input must match this grammar:\n{grammar}"]
    return Tool(
        name=tool_name(tool["name"]),
        description="\n\n".join(filter(None, words)) or None,
        parameters={
            "type": "object",
            "properties": {CUSTOM_INPUT: {"type": "string"}},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        },
        strict=pattern is not None,
        is_custom=True,
        pattern=pattern,
    )


def tool_name(name: BodyValue) -> str:
    """Return a tool's name.

    Raises:
        InvalidRequestError: the name is not one that a tool may have.
    """
    if not isinstance(name.value, str) or not TOOL_NAME.fullmatch(name.value):
        raise name.refusal("must be 1 to 128 of letters, digits, _ . and -")
    return name.value


def check_tools(described: Sequence[tuple[BodyValue, Tool]]) -> tuple[Tool, ...]:
    """Return the tools, each of which comes with what describes it.

    Raises:
        InvalidRequestError: there are too many, or two of one name; names the field.
    """
    if len(described) > MAX_TOOLS:
        raise InvalidRequestError(f"At most {MAX_TOOLS} tools.", param="tools")
    names: set[str] = set()
    for body, tool in described:
        if tool.name in names:
            raise body["name"].refusal(f"{tool.name!r} is the name of another tool too")
        names.add(tool.name)
    return tuple(tool for _, tool in described)


def tool_choice(
    choice: BodyValue, names_of: Callable[[BodyValue], Sequence[str]], *, allowed_in: str | None
) -> ToolChoice:
    """Return ``tool_choice`` of OpenAI's APIs in each of its forms; absent, it is "auto".

    Args:
        choice: of the body.
        names_of: the names of the tools that an object of a type in ``TOOL_TYPES`` names.
        allowed_in: the key under which a choice of type allowed_tools has mode and tools; None: it
            has them itself.

    Raises:
        InvalidRequestError: it has none of the forms.
    """
    if choice.value is None:
        return ToolChoice()
    if isinstance(choice.value, str) and choice.value in list(ToolMode):
        return ToolChoice(mode=ToolMode(choice.value))
    if not isinstance(choice.value, Mapping):
        raise choice.refusal('must be "none", "auto", "required" or an object naming tools')
    if choice.type in TOOL_TYPES:
        return ToolChoice.named(names_of(choice)[0])
    if choice.type != "allowed_tools":
        raise choice["type"].refusal('must be "function", "custom" or "allowed_tools" here')
    allowed = choice if allowed_in is None else choice[allowed_in].object()
    mode = allowed["mode"]
    if mode.value not in ("auto", "required"):
        raise mode.refusal('must be "auto" or "required"')
    names = [name for tool in allowed["tools"].entries() for name in names_of(tool)]
    return ToolChoice(mode=ToolMode(mode.value), names=tuple(dict.fromkeys(names)))


def check_choice(choice: ToolChoice, tools: Sequence[Tool]) -> ToolChoice:
    """Return a choice that the tools can meet.

    Raises:
        InvalidRequestError: a tool must be called but there is none, or a name is no tool's.
    """
    body = BodyValue(None, choice.param)
    names = {tool.name for tool in tools}
    unknown = [name for name in choice.names or () if name not in names]
    if unknown:
        raise body.refusal(f"names {unknown[0][:128]!r}, which is not among the tools")
    if choice.mode is ToolMode.REQUIRED and (not tools or choice.names == ()):
        raise body.refusal("wants a tool called, but there is none")
    return choice


def callable_tools(tools: Iterable[Tool], choice: ToolChoice) -> tuple[Tool, ...]:
    """Return the tools that may be called."""
    if choice.mode is ToolMode.NONE:
        return ()
    return tuple(tool for tool in tools if choice.names is None or tool.name in choice.names)


def _object_schema(parameters: BodyValue) -> dict[str, Any]:
    """Return the schema, which is that of an object even where it does not say so."""
    schema = parameters.value
    if schema is None:
        schema = {"type": "object", "properties": dict[str, Any]()}
    if not is_mapping(schema):
        raise parameters.refusal("must be a JSON schema")
    if schema.get("type", "object") != "object":
        raise parameters.refusal('must be a JSON schema of type "object"')
    return {"type": "object"} | dict(schema)


def _grammar(format_: BodyValue) -> tuple[str, str | None]:
    """Return the definition of a format's grammar, and its expression; "" and None without one."""
    if format_.value is None or format_.object().type == "text":
        return "", None
    # The Responses API has both in the format itself.
    grammar = format_ if format_["grammar"].value is None else format_["grammar"].object()
    syntax = grammar["syntax"]
    if syntax.value not in ("lark", "regex"):
        raise syntax.refusal('must be "lark" or "regex"')
    definition = grammar["definition"]
    text = definition.filled_text()
    if syntax.value == "regex":
        return text, text
    try:
        return text, lark_regex(text)
    except InvalidRequestError as refusal:
        refusal.param = definition.where
        raise
