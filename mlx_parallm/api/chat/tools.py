"""Tools and the choice among them, from the shapes of chat completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_parallm.api.turns.body_value import BodyValue
from mlx_parallm.api.turns.tools import (
    TOOL_TYPES,
    Tool,
    ToolChoice,
    check_choice,
    check_tools,
    custom_tool,
    function_tool,
    tool_choice,
)


def chat_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Return the tools of a chat request.

    Raises:
        InvalidRequestError: one is malformed; names its field, as ``tools[3].function.name``.
    """
    return check_tools([_tool(tool) for tool in BodyValue(tools, "tools").entries()])


def chat_functions(functions: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Return the deprecated ``functions`` of a chat request.

    Raises:
        InvalidRequestError: one is malformed; names its field.
    """
    entries = BodyValue(functions, "functions").entries()
    return check_tools([(function, function_tool(function)) for function in entries])


def chat_tool_choice(choice: Any, tools: Sequence[Tool]) -> ToolChoice:
    """Return ``tool_choice`` in each of its forms; None is "auto".

    Raises:
        InvalidRequestError: it has none of the forms, or the tools cannot meet it.
    """
    body = BodyValue(choice, "tool_choice")
    return check_choice(tool_choice(body, _names, allowed_in="allowed_tools"), tools)


def chat_function_choice(choice: Any, tools: Sequence[Tool]) -> ToolChoice:
    """Return the deprecated ``function_call``: none, auto or ``{"name": …}``.

    Raises:
        InvalidRequestError: it has none of the forms, or names no function.
    """
    body = BodyValue(choice, "function_call")
    if isinstance(choice, Mapping):
        read = ToolChoice.named(body["name"].text())
    else:
        read = tool_choice(body, _names, allowed_in="allowed_tools")
    return check_choice(read, tools, field="function_call")


def _tool(tool: BodyValue) -> tuple[BodyValue, Tool]:
    inner = _inner(tool).object()
    return inner, custom_tool(inner) if tool.type == "custom" else function_tool(inner)


def _inner(tool: BodyValue) -> BodyValue:
    """Return what stands under the name of the tool's type."""
    if tool.type not in TOOL_TYPES:
        raise tool["type"].refusal('must be "function" or "custom"')
    return tool[tool.type]


def _names(tool: BodyValue) -> list[str]:
    return [_inner(tool)["name"].text()]
