"""What the bodies of an encoder's routes share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    WithJsonSchema,
)

from mlx_parallm.api.chat.schema import ChatMessage
from mlx_parallm.api.http.forms import OpenForm
from mlx_parallm.api.turns.fields import TemplateKwargs, TurnEndFields

#: OpenAI takes 2,048.
MAX_INPUTS = 8192
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_MANY = {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS}
_TEXT = {"type": "string", "minLength": 1}
_SCHEMA = {"anyOf": [_TEXT, {**_MANY, "items": _TEXT}, _IDS, {**_MANY, "items": _IDS}]}


def _inputs(value: Any) -> list[str] | list[list[int]]:
    """Every input, as texts or as ids; one message for whatever else there is."""
    given = [value] if isinstance(value, str) or _is_ids(value) else value
    if not isinstance(given, list) or not 0 < len(given) <= MAX_INPUTS:
        given = None
    elif all(isinstance(one, str) for one in given):
        if "" in given:
            raise ValueError(f"text {given.index('')} is empty")
        return given
    elif all(map(_is_ids, given)):
        return given
    raise ValueError(
        f"must be a text, a list of 1 to {MAX_INPUTS} texts, token ids, or a list of lists of ids"
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


Inputs = Annotated[Any, BeforeValidator(_inputs), WithJsonSchema(_SCHEMA)]


class EncodeFields(OpenForm):
    """Which model reads the inputs, and how long they may be."""

    model: StrictStr | None = Field(None, description="The first that can do it by default.")
    truncate_prompt_tokens: StrictInt | None = Field(
        None, ge=-1, description="Cut inputs to so many tokens; -1 to what the model takes."
    )
    truncation_side: Literal["left", "right"] = Field(
        "right", description="The end of an input at which it is cut."
    )
    request_id: StrictStr | None = Field(
        None, min_length=1, max_length=128, description="Part of the answer's id."
    )
    user: StrictStr | None = Field(None, description="Not read.")
    priority: StrictInt | None = Field(None, description="Not read.")
    cache_salt: StrictStr | None = Field(None, description="Not read.")


class TextsRequest(TurnEndFields, EncodeFields):
    """vLLM's: texts or token ids as ``input``, or a conversation as ``messages``."""

    input: Inputs = Field(
        None, description="A text or several, or the token ids of one or of several."
    )
    messages: list[ChatMessage] | list[list[ChatMessage]] | None = Field(
        None,
        min_length=1,
        max_length=MAX_INPUTS,
        description="In place of input: a conversation or several, by the chat template.",
    )
    add_special_tokens: StrictBool | None = Field(
        None, description="Special tokens around a text; true for texts, false for conversations."
    )
    add_generation_prompt: StrictBool = Field(False, description="Open the assistant's turn.")
    chat_template: StrictStr | None = Field(None, description="Refused: see --chat-template.")
    chat_template_kwargs: TemplateKwargs
