"""From the body of a chat request to a turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_parallm.api.chat.schema import ChatRequest
from mlx_parallm.api.turns.constraints import body_structure
from mlx_parallm.api.turns.fields import BodyValue, sampling_params
from mlx_parallm.api.turns.images import pixel_range_of
from mlx_parallm.api.turns.prelude import Prelude
from mlx_parallm.api.turns.request import TurnRequest
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
    return check_choice(replace(read, param="function_call"), tools)


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


def chat_turn(body: ChatRequest, prelude: Prelude) -> TurnRequest:
    """Return the turn that a body describes.

    Raises:
        InvalidRequestError: a field is malformed, or asks for what is not served; names it.
    """
    body.check_supported()
    tools, choice = _tools(body)
    structure, structure_field = body_structure(body) or (None, "")
    limit = body.max_completion_tokens
    return TurnRequest(
        request_id=f"chatcmpl-{body.request_id or prelude.answer_id}",
        messages=body.turns(),
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls and not body.is_function_call,
        structure=structure,
        structure_field=structure_field,
        template_kwargs=body.template_kwargs(),
        pixel_range=pixel_range_of(body.mm_processor_kwargs),
        thinking_budget=body.thinking_budget(),
        separate_reasoning=body.separate_reasoning,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        parses_calls=bool(body.return_token_ids),
        params=sampling_params(
            body,
            max_logprobs=prelude.config.max_logprobs,
            max_tokens=body.max_tokens if limit is None else limit,
            logprobs=body.top(),
            **body.beam_values(),
        ),
        truncate=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        priority=body.priority,
        client=prelude.client,
        cache_salt=body.cache_salt,
    )


def _tools(body: ChatRequest) -> tuple[tuple[Tool, ...], ToolChoice]:
    if body.is_function_call:
        functions = chat_functions(body.functions or ())
        return functions, chat_function_choice(body.function_call, functions)
    tools = chat_tools(body.tools or ())
    return tools, chat_tool_choice(body.tool_choice, tools)
