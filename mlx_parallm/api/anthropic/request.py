"""From the body of a messages request to a turn."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlx_parallm.api.anthropic.contents import PLACE
from mlx_parallm.api.anthropic.history import conversation, is_continued
from mlx_parallm.api.anthropic.schema import CountTokensRequest, MessagesRequest, ToolChoiceBody
from mlx_parallm.api.turns.constraints import body_structure
from mlx_parallm.api.turns.fields import BodyValue, sampling_params
from mlx_parallm.api.turns.images import pixel_range_of
from mlx_parallm.api.turns.prepare import PreparedTurn
from mlx_parallm.api.turns.request import TurnRequest
from mlx_parallm.api.turns.tools import (
    Tool,
    ToolChoice,
    ToolMode,
    check_choice,
    check_tools,
    function_tool,
)
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.grammar import spec as specs
from mlx_parallm.grammar.spec import GrammarSpec
from mlx_parallm.types.errors import ContextLengthError, InvalidRequestError
from mlx_parallm.types.json_values import is_mapping
from mlx_parallm.types.request import SamplingParams
from mlx_parallm.types.step import RunnerInfo

_MODES = {"auto": ToolMode.AUTO, "any": ToolMode.REQUIRED, "none": ToolMode.NONE}


def counted_turn(body: CountTokensRequest, *, request_id: str, client: str) -> TurnRequest:
    """Return the conversation of a body, without what only matters to its answer.

    Raises:
        InvalidRequestError: a field is malformed, or asks for what is not served; names it.
    """
    turns = conversation(body.system, body.messages)
    continued = is_continued(turns)
    tools = _tools(body.tools)
    choice = _choice(body.tool_choice)
    check_choice(choice, tools)
    return TurnRequest(
        request_id=request_id,
        messages=turns,
        tools=tools,
        tool_choice=choice,
        template_kwargs=_template_kwargs(body),
        pixel_range=pixel_range_of(body.mm_processor_kwargs),
        add_generation_prompt=not continued,
        continue_final_message=continued,
        client=client,
    )


def message_turn(body: MessagesRequest, *, request_id: str, client: str) -> TurnRequest:
    """Return what a body asks for.

    Raises:
        InvalidRequestError: a field is malformed, or asks for what is not served; names it.
    """
    turn = counted_turn(body, request_id=request_id, client=client)
    choice = body.tool_choice
    structure, structure_field = _structure(body) or (None, "")
    return replace(
        turn,
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        structure=structure,
        structure_field=structure_field,
        thinking_budget=_thinking_budget(body),
        params=_params(body),
        truncate=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        priority=body.priority,
        cache_salt=body.cache_salt,
    )


def within_context(prepared: PreparedTurn) -> tuple[PreparedTurn, bool]:
    """Return the turn with ``max_tokens`` cut to the room in the context, and True if it was cut.

    Anthropic's clients ask for as many tokens as their largest model can write.

    Raises:
        InvalidRequestError: the prompt alone leaves no room. Clients shorten the conversation when
            they read these words.
    """
    info, length = prepared.model.info, len(prepared.prompt_ids)
    limit = _context(info)
    wanted, room = prepared.request.params.max_tokens or 0, limit - length
    if wanted <= room:
        return prepared, False
    if room <= 0:
        raise _too_long(str(length), limit - 1)
    params = replace(prepared.request.params, max_tokens=room)
    return replace(prepared, request=replace(prepared.request, params=params)), True


@contextlib.contextmanager
def too_long_in_these_words(model: GenerationModel) -> Generator[None]:
    """Let a prompt that is refused before it is encoded be refused as by ``within_context``."""
    try:
        yield
    except ContextLengthError as refusal:
        if refusal.prompt_tokens is None:
            raise
        most = model.info.max_source_len if model.takes_sources else _context(model.info) - 1
        raise _too_long(refusal.prompt_tokens, most) from refusal


def _context(info: RunnerInfo) -> int:
    return min(info.max_model_len, info.num_blocks * info.block_size)


def _too_long(prompt_tokens: str, most: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"prompt is too long: {prompt_tokens} tokens > {most} maximum",
        code="context_length_exceeded",
    )


def _params(body: MessagesRequest) -> SamplingParams:
    if not all(body.stop_sequences):
        raise InvalidRequestError("A stop sequence must not be empty.", param="stop_sequences")
    return sampling_params(body, max_logprobs=0, stop=(*body.stops(), *body.stop_sequences))


def _template_kwargs(body: CountTokensRequest) -> dict[str, Any]:
    """Return the template's variables for thinking and effort."""
    kwargs: dict[str, Any] = {}
    if body.thinking is not None:
        kwargs["enable_thinking"] = body.thinking.type != "disabled"
    if body.output_config.effort is not None:
        kwargs["reasoning_effort"] = body.output_config.effort
    return kwargs


def _thinking_budget(body: MessagesRequest) -> int | None:
    thinking = body.thinking
    if thinking is None or thinking.type != "enabled":
        return None
    if thinking.budget_tokens is None:
        raise InvalidRequestError(
            "thinking.budget_tokens is missing; thinking of type adaptive has none.",
            param="thinking.budget_tokens",
        )
    return thinking.budget_tokens


def _structure(body: MessagesRequest) -> tuple[GrammarSpec, str] | None:
    """Return what the text must match, and the field that says so."""
    structure = body_structure(body)
    field = "output_format" if body.output_config.format is None else "output_config.format"
    format_ = body.output_config.format or body.output_format
    if format_ is None:
        return structure
    if structure is not None:
        raise InvalidRequestError(
            f"{structure[1]} and {field} exclude each other: an answer can match one structure.",
            param=field,
        )
    value = BodyValue(format_, field)
    if value.type != "json_schema":
        raise value["type"].refusal('must be "json_schema"')
    schema = value["schema"]
    if not is_mapping(schema.value):
        raise schema.refusal("must be a JSON schema")
    return specs.json_schema(schema.value, strict=True, param=schema.where), schema.where


def _tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Return the tools that the client runs and describes, without those of other types."""
    entries = BodyValue(tools, "tools").entries(form=PLACE)
    own = [tool for tool in entries if tool["type"].optional_text() in (None, "custom")]
    return check_tools([(tool, _tool(tool)) for tool in own])


def _tool(tool: BodyValue) -> Tool:
    if tool["input_schema"].value is None:
        raise tool["input_schema"].refusal("is missing")
    return function_tool(tool, schema_field="input_schema")


def _choice(choice: ToolChoiceBody | None) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    if choice.type != "tool":
        return ToolChoice(mode=_MODES[choice.type])
    if choice.name is None:
        raise BodyValue(None, "tool_choice.name").refusal("is missing")
    return ToolChoice.named(choice.name)
