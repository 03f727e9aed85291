"""Tools and the choice among them, from the shapes of chat completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlx_parallm.api.turns.tools import (
    Tool,
    ToolChoice,
    ToolMode,
    check_choice,
    check_tools,
    custom_tool,
    function_tool,
)
from mlx_parallm.types.errors import InvalidRequestError

CHOICES = 'must be "none", "auto", "required" or an object naming tools'


def chat_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """The tools of a chat request.

    Raises:
        InvalidRequestError: one is malformed; names its field, as ``tools[3].function.name``.
    """
    places = [f"tools[{number}].{tool.get('type')}" for number, tool in enumerate(tools)]
    read = tuple(_tool(tool, number) for number, tool in enumerate(tools))
    check_tools(read, places)
    return read


def chat_functions(functions: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """The deprecated ``functions`` of a chat request.

    Raises:
        InvalidRequestError: one is malformed; names its field.
    """
    places = [f"functions[{number}]" for number in range(len(functions))]
    read = tuple(_function(one, where) for one, where in zip(functions, places, strict=True))
    check_tools(read, places)
    return read


def chat_tool_choice(choice: Any, tools: Sequence[Tool]) -> ToolChoice:
    """``tool_choice`` in each of its forms; None is "auto".

    Raises:
        InvalidRequestError: it has none of the forms, or the tools cannot meet it.
    """
    read = _choice(choice, "tool_choice")
    check_choice(read, tools)
    return read


def chat_function_choice(choice: Any, tools: Sequence[Tool]) -> ToolChoice:
    """The deprecated ``function_call``: none, auto or ``{"name": …}``.

    Raises:
        InvalidRequestError: it has none of the forms, or names no function.
    """
    read = (
        ToolChoice.named(_name(choice, "function_call"))
        if isinstance(choice, Mapping)
        else _choice(choice, "function_call")
    )
    check_choice(read, tools, field="function_call")
    return read


def _tool(tool: Mapping[str, Any], number: int) -> Tool:
    type_ = tool.get("type")
    where = f"tools[{number}].{type_}"
    if type_ not in ("function", "custom"):
        raise InvalidRequestError(
            f'tools[{number}].type must be "function" or "custom".', param=f"tools[{number}].type"
        )
    inner = tool.get(type_)
    if not isinstance(inner, Mapping):
        raise InvalidRequestError(f"{where} must be an object.", param=where)
    if type_ == "custom":
        return custom_tool(
            inner.get("name"),
            description=inner.get("description"),
            format_=inner.get("format"),
            where=where,
        )
    return _function(inner, where)


def _function(function: Mapping[str, Any], where: str) -> Tool:
    return function_tool(
        function.get("name"),
        description=function.get("description"),
        parameters=function.get("parameters"),
        strict=function.get("strict"),
        where=where,
    )


def _choice(choice: Any, field: str) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    if isinstance(choice, str) and choice in list(ToolMode):
        return ToolChoice(mode=ToolMode(choice))
    if not isinstance(choice, Mapping):
        raise InvalidRequestError(f"{field} {CHOICES}.", param=field)
    type_ = choice.get("type")
    if type_ in ("function", "custom"):
        return ToolChoice.named(_name(choice.get(type_), f"{field}.{type_}"))
    if type_ == "allowed_tools":
        return _allowed(choice.get("allowed_tools"), f"{field}.allowed_tools")
    raise InvalidRequestError(
        f'{field}.type must be "function", "custom" or "allowed_tools".', param=f"{field}.type"
    )


def _allowed(allowed: Any, field: str) -> ToolChoice:
    if not isinstance(allowed, Mapping):
        raise InvalidRequestError(f"{field} must be an object.", param=field)
    mode = allowed.get("mode")
    if mode not in ("auto", "required"):
        raise InvalidRequestError(
            f'{field}.mode must be "auto" or "required".', param=f"{field}.mode"
        )
    tools = allowed.get("tools")
    if not isinstance(tools, list):
        raise InvalidRequestError(f"{field}.tools must be a list.", param=f"{field}.tools")
    names = []
    for number, tool in enumerate(tools):
        where = f"{field}.tools[{number}]"
        type_ = tool.get("type") if isinstance(tool, Mapping) else None
        if type_ not in ("function", "custom"):
            raise InvalidRequestError(
                f'{where}.type must be "function" or "custom".', param=f"{where}.type"
            )
        names.append(_name(tool.get(type_), f"{where}.{type_}"))
    return ToolChoice(mode=ToolMode(mode), names=tuple(names))


def _name(value: Any, where: str) -> str:
    name = value.get("name") if isinstance(value, Mapping) else None
    if not isinstance(name, str):
        raise InvalidRequestError(f"{where}.name must be a text.", param=f"{where}.name")
    return name
