"""The body of ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from mlx_parallm.api.http.forms import MAX_MESSAGES
from mlx_parallm.api.turns.fields import (
    UNSUPPORTED,
    GenerationRequest,
    ProcessorKwargs,
    TemplateKwargs,
    ThinkingFields,
    TurnEndFields,
    effort_kwargs,
)
from mlx_parallm.api.turns.images import ImageSource, detail_of, image_part
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_object

ROLES = ("developer", "system", "user", "assistant", "tool", "function")
# MAY_SAY_NOTHING: roles whose content may be null: calls have none, nor has a tool that only acts.
MAY_SAY_NOTHING = ("assistant", "tool", "function")


class ChatMessage(BaseModel):
    """One turn; other keys (``tool_calls``, ``tool_call_id``, ``name``) go to the template."""

    model_config = ConfigDict(extra="allow")

    role: StrictStr = Field(description=f"One of {', '.join(ROLES)}.")
    content: StrictStr | list[dict[str, Any]] | None = Field(
        None,
        description='A text, or parts {"type": "text", "text": …} and, for models that take '
        'images, {"type": "image_url", "image_url": {"url": …}}; null for an assistant.',
    )


Messages = Annotated[
    list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]


class ChatRequest(TurnEndFields, ThinkingFields, GenerationRequest):
    """A conversation to be continued by the assistant."""

    messages: Messages = Field(description="The conversation so far.")
    max_completion_tokens: StrictInt | None = Field(
        None, ge=0, description="Most tokens to generate; default: the rest of the context."
    )
    max_tokens: StrictInt | None = Field(None, ge=0, description="Superseded by the above.")
    logprobs: StrictBool = Field(False, description="Log-probabilities of the output tokens.")
    top_logprobs: StrictInt | None = Field(
        None, ge=-1, description="Alternatives per output token, -1 for all; needs logprobs."
    )
    echo: StrictBool = Field(
        False, description="Begin the answer with a last message of the assistant."
    )
    reasoning_effort: StrictStr | None = Field(None, description="Handed to the template.")
    enable_thinking: StrictBool | None = Field(None, description="Handed to the template.")
    include_reasoning: StrictBool = Field(True, description="False leaves the reasoning out.")
    separate_reasoning: StrictBool = Field(
        True, description="False leaves the reasoning in the content, with its markers."
    )
    modalities: list[StrictStr] | None = Field(None, description='Only ["text"].')
    chat_template: StrictStr | None = Field(None, description="Refused: see --chat-template.")
    chat_template_kwargs: TemplateKwargs
    mm_processor_kwargs: ProcessorKwargs = None
    tools: list[dict[str, Any]] | None = Field(
        None, description="What the model may call: function and custom tools."
    )
    tool_choice: StrictStr | dict[str, Any] | None = Field(
        None, description='"none", "auto", "required", one tool by name, or allowed_tools.'
    )
    parallel_tool_calls: StrictBool = Field(True, description="False: at most one call.")
    functions: list[dict[str, Any]] | None = Field(None, description="Superseded by tools.")
    function_call: StrictStr | dict[str, Any] | None = Field(
        None, description="Superseded by tool_choice."
    )
    store: StrictBool = Field(
        False, description="Keep the chat on the server, if that has a data folder."
    )
    metadata: Any = Field(
        None, description="Kept with a chat that is stored: 16 pairs of texts at most."
    )
    nvext: Any = Field(
        None,
        description='ART\'s: {"extra_fields": ["engine_data"]} adds policy_token_spans and '
        "prompt_policy_token_spans to each choice.",
    )

    def check_supported(self) -> None:
        """Refuse what this server does not honour yet, by name.

        Raises:
            InvalidRequestError: a template, or audio.
        """
        code = "unsupported_parameter"
        if self.chat_template is not None:
            # A template is a program: one from a stranger could run for ever.
            raise InvalidRequestError(
                "A request may not bring a chat template; the server has --chat-template.",
                param="chat_template",
                code=code,
            )
        self.refuse("audio", *UNSUPPORTED)
        if any(modality != "text" for modality in self.modalities or ()):
            raise InvalidRequestError(
                "Only the modality text is supported.", param="modalities", code=code
            )

    @property
    def is_function_call(self) -> bool:
        """True if calls are wanted in the deprecated form."""
        return bool(self.functions) and not self.tools

    @property
    def wants_policies(self) -> bool:
        """True if choices name the ART policies that made their tokens."""
        fields = self.nvext.get("extra_fields") if is_object(self.nvext) else None
        return isinstance(fields, list) and "engine_data" in fields

    def top(self) -> int | None:
        """Return how many alternatives per token; None when no log-probabilities are wanted.

        Raises:
            InvalidRequestError: ``top_logprobs`` without ``logprobs``.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs needs logprobs to be true.", param="top_logprobs"
            )
        return (self.top_logprobs or 0) if self.logprobs or self.logprob_token_ids else None

    def template_kwargs(self) -> dict[str, Any]:
        """Return the template's further variables; ``chat_template_kwargs`` win over shorthands."""
        kwargs = effort_kwargs(self.reasoning_effort)
        if self.enable_thinking is not None:
            kwargs["enable_thinking"] = self.enable_thinking
        return kwargs | self.chat_template_kwargs

    def echoed(self) -> str:
        """Return what ``echo`` puts before every sample: a last message of the assistant."""
        last = self.turns()[-1]
        is_echoed = self.echo and last["role"] == "assistant"
        return last["content"] if is_echoed and isinstance(last["content"], str) else ""

    def turns(self) -> list[dict[str, Any]]:
        """Return the messages as the template takes them, "developer" as "system".

        A content is a text; with images it is a list of parts, see ``image_part``.

        Raises:
            InvalidRequestError: an unknown role, or content that is neither text nor images.
        """
        return turns_of(self.messages, takes_images=True)


def turns_of(
    messages: Sequence[ChatMessage], *, takes_images: bool = False
) -> list[dict[str, Any]]:
    """Return messages as the template takes them; see ``ChatRequest.turns``."""
    return [
        _turn(message, number, takes_images=takes_images) for number, message in enumerate(messages)
    ]


def _turn(message: ChatMessage, number: int, *, takes_images: bool) -> dict[str, Any]:
    if message.role not in ROLES:
        raise InvalidRequestError(
            f"messages[{number}].role {message.role[:32]!r} is not one of {', '.join(ROLES)}.",
            param="messages",
        )
    # Clients send back the nulls of an answer; templates ask whether a key is there.
    extra = message.model_extra or {}
    turn: dict[str, Any] = {key: value for key, value in extra.items() if value is not None}
    turn["role"] = "system" if message.role == "developer" else message.role
    turn["content"] = _content(message.content, number, takes_images=takes_images)
    if message.content is None and message.role not in MAY_SAY_NOTHING:
        raise InvalidRequestError(f"messages[{number}].content is missing.", param="messages")
    return turn


def _content(
    content: str | list[dict[str, Any]] | None, number: int, *, takes_images: bool
) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        where, kind = f"messages[{number}].content[{index}]", part.get("type")
        if takes_images and kind == "image_url":
            parts.append(_image(part, where))
        elif kind in ("text", "refusal") and isinstance(part.get(kind), str):
            parts.append({"type": "text", "text": part[kind]})
        else:
            raise InvalidRequestError(
                f"{where}: a part of type {str(kind)[:64]!r} is not served, only text"
                + (", and image_url where the model takes images." if takes_images else "."),
                param="messages",
            )
    if any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _image(part: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a part of OpenAI's form, whose URL may also stand without an object."""
    value = part.get("image_url")
    image = {"url": value} if isinstance(value, str) else value
    if not is_object(image) or not isinstance(image.get("url"), str):
        raise InvalidRequestError(
            f"{where}.image_url must have the image's url.", param=f"{where}.image_url"
        )
    return image_part(
        ImageSource(
            param=f"{where}.image_url",
            url=image["url"],
            detail=detail_of(image.get("detail"), f"{where}.image_url.detail"),
        )
    )
