"""From the body of a Responses request to a turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlx_parallm.api.responses.items import Item, image_places
from mlx_parallm.api.responses.messages import item_messages
from mlx_parallm.api.responses.schema import ResponsesInput, ResponsesRequest
from mlx_parallm.api.responses.tools import ResponseTool, response_tool_choice
from mlx_parallm.api.turns.constraints import body_structure
from mlx_parallm.api.turns.fields import sampling_params
from mlx_parallm.api.turns.images import pixel_range_of
from mlx_parallm.api.turns.prelude import Prelude
from mlx_parallm.api.turns.request import TurnRequest
from mlx_parallm.types.errors import InvalidRequestError

#: What a body calls the names of the engine and of turns.
FIELDS = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
}


def input_turn(
    body: ResponsesInput, items: Sequence[Item], tools: Sequence[ResponseTool], *, request_id: str
) -> TurnRequest:
    """Return what the model is to read.

    Args:
        body: as it came.
        items: of the earlier responses and of the body's input.
        tools: of the body.
        request_id: of the answer.

    Raises:
        InvalidRequestError: a field is malformed, or there is no input; names it.
    """
    messages = item_messages(items, body.instructions, image_places(body.input))
    if not messages:
        raise InvalidRequestError("input is empty.", param="input")
    return TurnRequest(
        request_id=request_id,
        messages=messages,
        tools=tuple(tool.tool for tool in tools),
        tool_choice=response_tool_choice(body.tool_choice, tools),
        parallel_tool_calls=body.parallel_tool_calls,
        template_kwargs=body.template_kwargs(),
        pixel_range=pixel_range_of(body.mm_processor_kwargs),
    )


def response_turn(
    body: ResponsesRequest,
    items: Sequence[Item],
    tools: Sequence[ResponseTool],
    prelude: Prelude,
    *,
    request_id: str,
) -> TurnRequest:
    """Return what a body asks for; see ``input_turn``.

    Raises:
        InvalidRequestError: a field is malformed, or asks for what is not served; names it.
    """
    text_format = body.text and body.text.format
    structure, structure_field = body_structure(body, text_format=text_format) or (None, "")
    return replace(
        input_turn(body, items, tools, request_id=request_id),
        structure=structure,
        structure_field=structure_field,
        thinking_budget=body.thinking_budget(),
        params=sampling_params(
            body,
            max_logprobs=prelude.config.max_logprobs,
            max_tokens=body.max_output_tokens,
            logprobs=body.top(),
        ),
        truncate=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        priority=body.priority,
        client=prelude.client,
        cache_salt=body.cache_salt,
    )
