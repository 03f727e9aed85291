"""Bodies of ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``, in Anthropic's shape.

The types of Anthropic's Python SDK 2.11 are the authority for names and values.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from mlx_parallm.api.http.forms import INT64, MAX_MESSAGES, NullIsAbsent, Number
from mlx_parallm.api.turns.fields import ANY_GENERATOR, MAX_STOPS, ProcessorKwargs, SamplingRequest


class InputMessage(BaseModel):
    """One turn of the conversation."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["user", "assistant", "system"] = Field(description="Whose turn it is.")
    content: StrictStr | list[dict[str, Any]] = Field(
        description="A text, or blocks: text, image, document, search_result and tool_result of "
        "the user; text, thinking, tool_use, compaction, and server tools with their results, of "
        "the assistant."
    )


InputMessages = Annotated[
    list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]


class Thinking(NullIsAbsent):
    """Thinking before the answer."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["enabled", "disabled", "adaptive", "between_tools"] = Field(
        description="enabled takes budget_tokens; adaptive has no budget."
    )
    budget_tokens: StrictInt | None = Field(
        None, ge=1, lt=INT64, description="Most tokens of thinking."
    )
    display: Literal["summarized", "omitted"] = Field(
        "summarized", description="omitted leaves the text out, but not the signature."
    )


class ToolChoiceBody(NullIsAbsent):
    """Which tools are called."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["auto", "any", "tool", "none"] = Field(description="tool takes a name.")
    name: StrictStr | None = Field(None, description="The tool to call.")
    disable_parallel_tool_use: StrictBool = Field(False, description="At most one call.")


class Metadata(NullIsAbsent):
    """About the request."""

    model_config = ConfigDict(extra="ignore")

    user_id: StrictStr | None = Field(None, description="Accepted and ignored.")


class OutputConfig(NullIsAbsent):
    """Form and effort of the answer."""

    model_config = ConfigDict(extra="ignore")

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="Handed to the template as reasoning_effort."
    )
    format: dict[str, Any] | None = Field(
        None, description='{"type": "json_schema", "schema": …}: the text of the answer matches it.'
    )


class CountTokensRequest(NullIsAbsent):
    """A conversation whose tokens are to be counted."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: StrictStr | None = Field(None, description=ANY_GENERATOR)
    messages: InputMessages = Field(description="The conversation so far.")
    system: StrictStr | list[dict[str, Any]] = Field(
        "", description="What comes before the conversation: a text, or blocks of type text."
    )
    tools: list[dict[str, Any]] = Field(
        default_factory=list[dict[str, Any]],
        description="What the model may call: {name, description, input_schema}. Tools that a "
        "server runs, which have another type, are left out.",
    )
    tool_choice: ToolChoiceBody | None = Field(None, description="Default: auto.")
    thinking: Thinking | None = Field(None, description="Default: what the model does by itself.")
    output_config: OutputConfig = Field(
        default_factory=lambda: OutputConfig.model_construct(effort=None, format=None),
        description="Effort and format.",
    )
    output_format: dict[str, Any] | None = Field(
        None, description="The older name of output_config.format."
    )
    mm_processor_kwargs: ProcessorKwargs = None


class MessagesRequest(CountTokensRequest, SamplingRequest):
    """A conversation to be continued by the assistant; chat's sampling parameters work too."""

    max_tokens: StrictInt = Field(
        ge=0, lt=INT64, description="Most tokens to generate; 0 only fills the cache."
    )
    stop_sequences: list[StrictStr] = Field(
        default_factory=list,
        max_length=MAX_STOPS,
        description=f"Up to {MAX_STOPS} texts that end the answer.",
    )
    temperature: Number = Field(1.0, ge=0, le=1, description="0 is greedy.")
    metadata: Metadata | None = Field(None, description="Accepted and ignored.")
    service_tier: StrictStr | None = Field(None, description="Accepted and ignored.")


class TokenCount(BaseModel):
    """The answer to ``count_tokens``."""

    input_tokens: int = Field(description="Tokens of messages, system prompt and tools together.")


class MessageUsage(BaseModel):
    """Token counts; the prompt's are the sum of all three kinds of input."""

    input_tokens: int = Field(
        description="Tokens of the prompt that were computed and fill no block of the cache."
    )
    cache_creation_input_tokens: int = Field(
        description="Tokens of the prompt that were computed and put into the prefix cache."
    )
    cache_creation: dict[str, int] = Field(
        description="The same by Anthropic's times to live, under the shortest: blocks are kept "
        "until others need the room."
    )
    cache_read_input_tokens: int = Field(description="Tokens of the prompt that were cached.")
    output_tokens: int = Field(description="Tokens that were generated.")
    output_tokens_details: dict[str, int] = Field(description="thinking_tokens among them.")
    service_tier: Literal["standard"] = Field("standard", description="There is one.")


class Message(BaseModel):
    """The answer to ``messages``."""

    id: str = Field(description="Begins with msg_.")
    type: Literal["message"] = Field(description="What this is.")
    role: Literal["assistant"] = Field(description="Who says it.")
    model: str = Field(description="As it was asked for, or the first name of the default.")
    content: list[dict[str, Any]] = Field(description="Blocks of type thinking, text, tool_use.")
    stop_reason: Literal[
        "end_turn",
        "max_tokens",
        "stop_sequence",
        "tool_use",
        "pause_turn",
        "model_context_window_exceeded",
    ] = Field(description="Why it ended.")
    stop_sequence: str | None = Field(description="The stop sequence that ended it.")
    usage: MessageUsage = Field(description="Token counts.")


class MessagesErrorDetail(BaseModel):
    """The cause of an error."""

    type: str = Field(description="The kind of error, as Anthropic names it.")
    message: str = Field(description="For people.")
    details: dict[str, Any] | None = Field(None, description="A machine-readable error_code.")


class MessagesErrorResponse(BaseModel):
    """Anthropic's error object."""

    type: Literal["error"] = Field(description="What this is.")
    error: MessagesErrorDetail = Field(description="What went wrong.")
    request_id: str | None = Field(description="As in the header request-id.")
