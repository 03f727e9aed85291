"""Tools and the choice among them, from the shapes of the Responses API."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_parallm.api.turns.fields import BodyValue
from mlx_parallm.api.turns.tools import (
    TOOL_TYPES,
    Tool,
    ToolChoice,
    check_choice,
    check_tools,
    custom_tool,
    function_tool,
    tool_choice,
    tool_name,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTool:
    """A tool as the caller wrote it.

    Attributes:
        tool: as the model knows it: the tool of a namespace under its flat name.
        name: the caller's name for it.
        namespace: the one it is in; None for none.
        body: the tool as it stands in the body, but for its namespace.
    """

    tool: Tool
    name: str
    namespace: str | None
    body: BodyValue

    @property
    def names(self) -> dict[str, str]:
        """The keys that identify the tool in a call."""
        named = {"name": self.name}
        return named if self.namespace is None else named | {"namespace": self.namespace}


def flat_name(name: str, namespace: str | None) -> str:
    """Return what the model calls a tool of a namespace: templates know one level of names only."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def response_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[ResponseTool, ...]:
    """Return the tools that a model can use, without those that a server would run.

    Raises:
        InvalidRequestError: one is malformed; names its field, as ``tools[3].name``.
    """
    read: list[ResponseTool] = []
    for body in BodyValue(tools, "tools").entries():
        if body.type == "namespace":
            name = body["name"].filled_text()
            inner = [tool.object() for tool in body["tools"].entries()]
            read += [_tool(tool, name) for tool in inner if tool.type in TOOL_TYPES]
        elif body.type in TOOL_TYPES:
            read.append(_tool(body))
        else:
            logger.debug("left out a tool of type %.64r", body.type)
    check_tools([(tool.body, tool.tool) for tool in read])
    return tuple(read)


def response_tool_choice(choice: Any, tools: Sequence[ResponseTool]) -> ToolChoice:
    """Return ``tool_choice`` in each of its forms; None is "auto".

    Raises:
        InvalidRequestError: it has none of the forms, or the tools cannot meet it.
    """

    def names(body: BodyValue) -> list[str]:
        """Return the flat names of what is named: one tool, or those of a namespace."""
        # Tools that a server would run are left out here as among the tools.
        if body.object().type not in (*TOOL_TYPES, "namespace"):
            return []
        name, namespace = body["name"].text(), body["namespace"].value
        if body.type == "namespace":
            named = [tool.tool.name for tool in tools if tool.namespace == name]
        else:
            same = [tool for tool in tools if name in (tool.name, tool.tool.name)]
            named = [tool.tool.name for tool in same if namespace in (None, tool.namespace)][:1]
        if not named:
            raise body["name"].refusal(f"{name[:128]!r} is not among the tools")
        return named

    read = tool_choice(BodyValue(choice, "tool_choice"), names, allowed_in=None)
    return check_choice(read, [tool.tool for tool in tools])


def shown_tools(tools: Sequence[ResponseTool]) -> list[dict[str, Any]]:
    """Return the tools as an answer lists them; those of a namespace within it."""
    shown: list[dict[str, Any]] = []
    spaces: dict[str, list[dict[str, Any]]] = {}
    for tool in tools:
        if tool.namespace is None:
            shown.append(_shown(tool))
            continue
        if tool.namespace not in spaces:
            spaces[tool.namespace] = []
            space = {"type": "namespace", "name": tool.namespace, "description": ""}
            shown.append(space | {"tools": spaces[tool.namespace]})
        spaces[tool.namespace].append(_shown(tool))
    return shown


def _shown(tool: ResponseTool) -> dict[str, Any]:
    written = tool.body.value
    head = {
        "type": written["type"],
        "name": tool.name,
        "description": written.get("description"),
    }
    if tool.tool.is_custom:
        return head | {"format": written.get("format") or {"type": "text"}}
    return head | {"parameters": dict(tool.tool.parameters), "strict": tool.tool.strict}


def _tool(body: BodyValue, namespace: str | None = None) -> ResponseTool:
    tool = custom_tool(body) if body.type == "custom" else function_tool(body)
    flat = tool_name(BodyValue(flat_name(tool.name, namespace), body["name"].where))
    return ResponseTool(
        tool=replace(tool, name=flat), name=tool.name, namespace=namespace, body=body
    )
