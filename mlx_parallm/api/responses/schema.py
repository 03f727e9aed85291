"""The bodies of ``POST /v1/responses`` and ``POST /v1/responses/input_tokens``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from mlx_parallm.api.http.forms import MAX_MESSAGES, Metadata, NullIsAbsent
from mlx_parallm.api.turns.fields import (
    ProcessorKwargs,
    SamplingRequest,
    StreamFields,
    TemplateKwargs,
    ThinkingFields,
    effort_kwargs,
)
from mlx_parallm.types.errors import InvalidRequestError

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
#: OpenAI's values of ``include``.
Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
#: ``CREATE``: the type of a message that asks for a response.
CREATE = "response.create"
# LANE: a message's choice among responses that run side by side on one WebSocket.
LANE = "stream_id"
# Named by the specification; nothing here can honour them.
UNSUPPORTED = ("prompt",)


class ReasoningOptions(NullIsAbsent):
    """Reasoning effort, and which reasoning is returned."""

    model_config = ConfigDict(extra="allow")

    effort: StrictStr | None = Field(None, description='Handed to the template; "none" is off.')
    summary: StrictStr | None = Field(
        None, description="If given, reasoning comes as a summary too, which is the same text."
    )


class TextOptions(NullIsAbsent):
    """The form of the answer's text."""

    model_config = ConfigDict(extra="allow")

    format: dict[str, Any] | None = Field(
        None,
        description='{"type": "json_schema", "name": …, "schema": {…}, "strict": true}, '
        '{"type": "json_object"} or {"type": "text"}.',
    )
    verbosity: StrictStr | None = Field(None, description="Accepted and without effect.")


InputItems = Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class ConversationName(NullIsAbsent):
    """A conversation by its id."""

    id: StrictStr = Field(description="Its id.")


class ResponsesInput(BaseModel):
    """The input of a model: the part of a body that ``input_tokens`` takes too."""

    input: StrictStr | InputItems = Field(
        default_factory=list[dict[str, Any]],
        description="A text, or items: messages, calls, their outputs, …",
    )
    instructions: StrictStr | None = Field(None, description="The first system message.")
    previous_response_id: StrictStr | None = Field(
        None, description="A stored response; its input and output come before this input."
    )
    conversation: StrictStr | ConversationName | None = Field(
        None,
        description="A conversation, by its id or as an object with it; its items come before this "
        "input, and input and output are added to it once the response is complete.",
    )
    tools: list[dict[str, Any]] = Field(
        default_factory=list[dict[str, Any]],
        description="Tools of type function, custom and namespace; others are left out.",
    )
    tool_choice: StrictStr | dict[str, Any] | None = Field(
        None, description='"none", "auto", "required", one tool, or allowed_tools.'
    )
    parallel_tool_calls: StrictBool = Field(True, description="False: at most one call.")
    reasoning: ReasoningOptions | None = Field(None, description="Effort and summary.")
    text: TextOptions | None = Field(None, description="The format of the answer's text.")
    truncation: Literal["auto", "disabled"] = Field(
        "disabled", description="auto leaves the oldest items out of an input that is too long."
    )
    chat_template_kwargs: TemplateKwargs
    mm_processor_kwargs: ProcessorKwargs = None

    @property
    def conversation_id(self) -> str | None:
        """The id of the body's conversation; None without one."""
        name = self.conversation
        return name.id if isinstance(name, ConversationName) else name

    def check_input(self) -> None:
        """Refuse where an input could come from, but not here, by name.

        Raises:
            InvalidRequestError: a prompt's template, or both a response and a conversation.
        """
        for name in UNSUPPORTED:
            if (self.model_extra or {}).get(name):
                raise InvalidRequestError(
                    f"{name} is not supported.", param=name, code="unsupported_parameter"
                )
        if self.conversation is not None and self.previous_response_id is not None:
            raise InvalidRequestError(
                "Mutually exclusive parameters: 'previous_response_id' and 'conversation'. Give "
                "only one of them.",
                param="previous_response_id",
                code="mutually_exclusive_parameters",
            )

    def template_kwargs(self) -> dict[str, Any]:
        """Return the template's variables; ``chat_template_kwargs`` win over ``reasoning``."""
        return effort_kwargs(self.reasoning and self.reasoning.effort) | self.chat_template_kwargs


class ResponsesRequest(StreamFields, ThinkingFields, SamplingRequest, ResponsesInput):
    """An answer to be created."""

    max_output_tokens: StrictInt | None = Field(
        None,
        ge=1,
        description="Most tokens to generate, with reasoning; default: the rest of the context.",
    )
    top_logprobs: StrictInt | None = Field(
        None, ge=0, description="Alternatives per token of the text, with its log-probabilities."
    )
    include: Annotated[list[Includable], Field(fail_fast=True)] = Field(
        default_factory=list[Includable],
        description=f"Further parts of the answer: {LOGPROBS}, {ENCRYPTED_REASONING}; OpenAI's "
        "others have no effect.",
    )
    store: StrictBool = Field(True, description="Keep the response, within the server's bounds.")
    background: StrictBool = Field(
        False, description="Answer at once and go on; the response is asked for later."
    )
    metadata: Metadata = Field(default_factory=dict, description="Kept with the response.")
    max_tool_calls: StrictInt | None = Field(
        None, description="Of tools that run on the server, of which there are none."
    )
    safety_identifier: StrictStr | None = Field(None, description="Accepted and echoed.")
    prompt_cache_key: StrictStr | None = Field(None, description="Accepted and echoed.")
    generate: StrictBool = Field(
        True, description="False: check and keep the input; nothing is generated."
    )
    type: StrictStr | None = Field(
        None, description=f"Of messages of a WebSocket, which have {CREATE}."
    )

    def check_supported(self) -> None:
        """Refuse what this server does not do, by name.

        Raises:
            InvalidRequestError: a prompt's template, two histories, or several samples.
        """
        self.check_input()
        n = (self.model_extra or {}).get("n")
        if n and n != 1:
            raise InvalidRequestError(
                "n is not supported: a response has one sample.",
                param="n",
                code="unsupported_parameter",
            )
        if self.background and not self.store:
            raise InvalidRequestError("background needs store to be true.", param="background")

    def check_message(self) -> None:
        """Refuse what a message of a WebSocket may not ask for, by name.

        Raises:
            InvalidRequestError: it is of another type, or wants a response in the background or
                beside others.
        """
        if self.type != CREATE:
            raise InvalidRequestError(
                f"type must be {CREATE!r}.", param="type", code="unsupported_event"
            )
        if self.background:
            raise InvalidRequestError(
                "background is not supported on a WebSocket.", param="background"
            )
        self.refuse(LANE)

    @property
    def shows_logprobs(self) -> bool:
        """True if log-probabilities are wanted."""
        return LOGPROBS in self.include or bool(self.top_logprobs)

    def top(self) -> int | None:
        """Return how many alternatives per token; None when no log-probabilities are wanted."""
        return (self.top_logprobs or 0) if self.shows_logprobs else None


class InputTokensRequest(NullIsAbsent, ResponsesInput):
    """An input whose tokens are to be counted."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr | None = Field(None, description="A served model's name; default: the first.")


class CompactRequest(NullIsAbsent, ResponsesInput):
    """A conversation to be summed up."""

    without_effect = frozenset({"prompt_cache_options", "prompt_cache_retention", "service_tier"})

    model_config = ConfigDict(extra="allow")

    model: StrictStr = Field(description="A served model's name.")
    prompt_cache_key: StrictStr | None = Field(None, description="Accepted and ignored.")
