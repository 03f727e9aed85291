"""From the body of a chat request to a turn."""

from __future__ import annotations

from mlx_parallm.api.chat.schema import ChatRequest
from mlx_parallm.api.chat.tools import (
    chat_function_choice,
    chat_functions,
    chat_tool_choice,
    chat_tools,
)
from mlx_parallm.api.turns.images import pixel_range_of
from mlx_parallm.api.turns.prelude import Prelude
from mlx_parallm.api.turns.request import TurnRequest
from mlx_parallm.api.turns.sampling import sampling_params
from mlx_parallm.api.turns.structure import body_structure
from mlx_parallm.api.turns.tools import Tool, ToolChoice


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
