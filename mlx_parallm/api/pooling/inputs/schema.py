"""Fields and types that the bodies of pooling routes share."""

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
from mlx_parallm.api.http.keep_alive import KeepAliveFields
from mlx_parallm.api.pooling.inputs.encode import Reading
from mlx_parallm.api.turns.fields import TemplateKwargs, TurnEndFields
from mlx_parallm.types.json_values import is_list

# MAX_INPUTS: inputs of a request; OpenAI takes 2,048.
MAX_INPUTS = 8192
# MAX_INPUT_IDS: token ids of one input. The context length of the model is checked later.
MAX_INPUT_IDS = 2**20
TEXT = {"type": "string", "minLength": 1}
TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def many(item: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a list of as many items as a request may have."""
    return {"type": "array", "items": item, "minItems": 1, "maxItems": MAX_INPUTS}


def is_list_of(value: Any, kind: type) -> bool:
    """True if a value is a list of values of exactly this type, and not empty."""
    return is_list(value) and bool(value) and all(type(item) is kind for item in value)


def as_texts(value: Any) -> list[str] | None:
    """Return a text or several as a list; None if the value is something else, or too long."""
    texts = [value] if isinstance(value, str) else value
    return texts if is_list_of(texts, str) and len(texts) <= MAX_INPUTS else None


def as_ids(value: Any) -> list[list[int]] | None:
    """Return token ids of one input or of several as lists; None for something else."""
    lists = [value] if is_list_of(value, int) else value
    is_many = is_list_of(lists, list) and len(lists) <= MAX_INPUTS
    return lists if is_many and all(is_list_of(ids, int) for ids in lists) else None


def _texts(value: Any) -> list[str]:
    texts = as_texts(value)
    if texts is None:
        raise ValueError(f"must be a text or a list of 1 to {MAX_INPUTS} texts")
    return texts


def _inputs(value: Any) -> list[str] | list[list[int]]:
    """Return every input, as texts or as ids; refuse anything else with one message."""
    texts = as_texts(value)
    if texts is not None:
        if "" in texts:
            raise ValueError(f"text {texts.index('')} is empty")
        return texts
    if is_list(value) and len(value) > MAX_INPUT_IDS:
        raise ValueError(f"is longer than {MAX_INPUT_IDS} entries")
    lists = as_ids(value)
    if lists is not None:
        return lists
    raise ValueError(
        f"must be a text, a list of 1 to {MAX_INPUTS} texts, token ids, or a list of lists of ids"
    )


#: A text or several, of which some may be empty.
Texts = Annotated[
    Any,
    BeforeValidator(_texts),
    WithJsonSchema({"anyOf": [{"type": "string"}, many({"type": "string"})]}),
]
#: A text or several, or the token ids of one or of several; none is empty.
Inputs = Annotated[
    Any,
    BeforeValidator(_inputs),
    WithJsonSchema({"anyOf": [TEXT, many(TEXT), TOKEN_IDS, many(TOKEN_IDS)]}),
]
#: The length of the vectors in an answer.
Dimensions = Annotated[
    StrictInt | None,
    Field(ge=1, description="Length that vectors are cut to, where the model allows it."),
]
PromptName = Annotated[
    StrictStr | None, Field(description="Name of the model's prompt that precedes the texts.")
]


class PoolingFields(KeepAliveFields, OpenForm):
    """The model, and the limit on the length of inputs."""

    model: StrictStr | None = Field(None, description="Default: the first model with this task.")
    truncate_prompt_tokens: StrictInt | None = Field(
        None, ge=-1, description="Cut inputs to so many tokens; -1: to the model's limit."
    )
    truncation_side: Literal["left", "right"] = Field(
        "right", description="The end of an input at which it is cut."
    )
    request_id: StrictStr | None = Field(
        None, min_length=1, max_length=128, description="Part of the answer's id."
    )
    user: StrictStr | None = Field(None, description="Ignored.")
    priority: StrictInt | None = Field(None, description="Ignored.")
    cache_salt: StrictStr | None = Field(None, description="Ignored.")

    def reading(self, param: str) -> Reading:
        """Return how the inputs of this field are read."""
        is_left = self.truncation_side == "left"
        return Reading(truncate=self.truncate_prompt_tokens, from_left=is_left, param=param)


class TextsRequest(TurnEndFields, PoolingFields):
    """vLLM's body: texts or token ids as ``input``, or a conversation as ``messages``."""

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
