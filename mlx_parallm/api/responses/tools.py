"""Tools and the choice among them, from the shapes of the Responses API."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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

logger = logging.getLogger(__name__)

SERVED = ("function", "custom")
CHOICES = 'must be "none", "auto", "required" or an object naming tools'


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTool:
    """A tool as the caller wrote it.

    Attributes:
        tool: as the model knows it: the tool of a namespace under its flat name.
        name: the caller's name for it.
        namespace: the one it is in; None for none.
        written: the tool as it stands in the body, but for its namespace.
        where: its place in the body.
    """

    tool: Tool
    name: str
    namespace: str | None
    written: Mapping[str, Any]
    where: str

    @property
    def names(self) -> dict[str, str]:
        """The keys that tell of the tool in a call."""
        named = {"name": self.name}
        return named if self.namespace is None else named | {"namespace": self.namespace}


def flat_name(name: str, namespace: str | None) -> str:
    """What the model calls a tool of a namespace: templates know one level of names only."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def response_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[ResponseTool, ...]:
    """The tools of a body that a model can be told of; those that a server would run are left out.

    Raises:
        InvalidRequestError: one is malformed; names its field, as ``tools[3].name``.
    """
    found: list[ResponseTool] = []
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        if tool.get("type") == "namespace":
            found += _namespace(tool, where)
        elif tool.get("type") in SERVED:
            found.append(_tool(tool, where))
        else:
            logger.debug("left out a tool of type %.64r", tool.get("type"))
    check_tools([one.tool for one in found], [one.where for one in found])
    return tuple(found)


def response_tool_choice(choice: Any, tools: Sequence[ResponseTool]) -> ToolChoice:
    """``tool_choice`` in each of its forms; None is "auto".

    Raises:
        InvalidRequestError: it has none of the forms, or the tools cannot meet it.
    """
    read = _choice(choice, tools)
    check_choice(read, [one.tool for one in tools])
    return read


def shown_tools(tools: Sequence[ResponseTool]) -> list[dict[str, Any]]:
    """The tools as an answer tells of them; those of a namespace within it."""
    shown: list[dict[str, Any]] = []
    spaces: dict[str, list[dict[str, Any]]] = {}
    for one in tools:
        if one.namespace is None:
            shown.append(_shown(one))
            continue
        if one.namespace not in spaces:
            spaces[one.namespace] = []
            space = {"type": "namespace", "name": one.namespace, "description": ""}
            shown.append(space | {"tools": spaces[one.namespace]})
        spaces[one.namespace].append(_shown(one))
    return shown


def _shown(one: ResponseTool) -> dict[str, Any]:
    head = {
        "type": one.written["type"],
        "name": one.name,
        "description": one.written.get("description"),
    }
    if one.tool.is_custom:
        return head | {"format": one.written.get("format") or {"type": "text"}}
    return head | {"parameters": dict(one.tool.parameters), "strict": one.tool.strict}


def _namespace(space: Mapping[str, Any], where: str) -> list[ResponseTool]:
    name = space.get("name")
    if not isinstance(name, str) or not name:
        raise _refusal(f"{where}.name", "must be a text that is not empty")
    tools = space.get("tools")
    if not isinstance(tools, list):
        raise _refusal(f"{where}.tools", "must be a list")
    found = []
    for number, tool in enumerate(tools):
        place = f"{where}.tools[{number}]"
        if not isinstance(tool, Mapping):
            raise _refusal(place, "must be an object")
        if tool.get("type") in SERVED:
            found.append(_tool(tool, place, name))
    return found


def _tool(tool: Mapping[str, Any], where: str, namespace: str | None = None) -> ResponseTool:
    if tool["type"] == "custom":
        read = custom_tool(
            tool.get("name"),
            description=tool.get("description"),
            format_=tool.get("format"),
            where=where,
        )
    else:
        read = function_tool(
            tool.get("name"),
            description=tool.get("description"),
            parameters=tool.get("parameters"),
            strict=tool.get("strict"),
            where=where,
        )
    name = read.name
    if namespace is not None:
        flat = flat_name(name, namespace)
        # Checks that the name is one a model may be told of.
        function_tool(flat, where=where)
        read = replace(read, name=flat)
    return ResponseTool(tool=read, name=name, namespace=namespace, written=tool, where=where)


def _choice(choice: Any, tools: Sequence[ResponseTool]) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    if isinstance(choice, str) and choice in list(ToolMode):
        return ToolChoice(mode=ToolMode(choice))
    if not isinstance(choice, Mapping):
        raise _refusal("tool_choice", CHOICES)
    if choice.get("type") in SERVED:
        return ToolChoice.named(_named(choice, tools, "tool_choice")[0])
    if choice.get("type") == "allowed_tools":
        return _allowed(choice, tools)
    raise _refusal("tool_choice.type", 'must be "function", "custom" or "allowed_tools" here')


def _allowed(choice: Mapping[str, Any], tools: Sequence[ResponseTool]) -> ToolChoice:
    mode = choice.get("mode")
    if mode not in ("auto", "required"):
        raise _refusal("tool_choice.mode", 'must be "auto" or "required"')
    listed = choice.get("tools")
    if not isinstance(listed, list):
        raise _refusal("tool_choice.tools", "must be a list")
    names: list[str] = []
    for number, tool in enumerate(listed):
        where = f"tool_choice.tools[{number}]"
        if not isinstance(tool, Mapping):
            raise _refusal(where, "must be an object")
        # Tools that a server would run are left out here as among the tools.
        if tool.get("type") in (*SERVED, "namespace"):
            names += _named(tool, tools, where)
    return ToolChoice(mode=ToolMode(mode), names=tuple(dict.fromkeys(names)))


def _named(choice: Mapping[str, Any], tools: Sequence[ResponseTool], where: str) -> list[str]:
    """The flat names of what a choice names: one tool, or those of a namespace."""
    name, namespace = choice.get("name"), choice.get("namespace")
    if not isinstance(name, str):
        raise _refusal(f"{where}.name", "must be a text")
    if choice["type"] == "namespace":
        found = [one.tool.name for one in tools if one.namespace == name]
    else:
        same = [one for one in tools if name in (one.name, one.tool.name)]
        found = [one.tool.name for one in same if namespace in (None, one.namespace)][:1]
    if not found:
        raise _refusal(f"{where}.name", f"{name[:128]!r} is not among the tools")
    return found


def _refusal(param: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} {why}.", param=param)
