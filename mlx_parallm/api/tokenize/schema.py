"""Bodies of ``POST /tokenize`` and ``POST /detokenize``, in vLLM's shape, and TEI's."""

from __future__ import annotations

from typing import Any

from pydantic import AliasChoices, Field, StrictBool, StrictStr

from mlx_parallm.api.chat.schema import Messages
from mlx_parallm.api.http.forms import Ids, NullIsAbsent
from mlx_parallm.api.pooling.inputs.schema import PromptName, Texts
from mlx_parallm.api.turns.fields import ProcessorKwargs, TemplateKwargs, TurnEndFields


class TokenizeRequest(TurnEndFields):
    """A text (``prompt`` or llama.cpp's ``content``) or a conversation; or TEI's ``inputs``."""

    model: StrictStr | None = Field(
        None,
        description="Default: the first that generates, else, or of inputs, the first encoder.",
    )
    prompt: StrictStr | None = Field(
        None, validation_alias=AliasChoices("prompt", "content"), description="A text."
    )
    messages: Messages | None = Field(None, description="A conversation.")
    tools: list[dict[str, Any]] | None = Field(None, description="Tools for the template.")
    add_special_tokens: StrictBool = Field(
        True, description="Add the model's special tokens to a text."
    )
    chat_template_kwargs: TemplateKwargs
    mm_processor_kwargs: ProcessorKwargs = None
    return_token_strs: StrictBool = Field(
        False, description='Add every token as the vocabulary has it, such as "Ġword".'
    )
    inputs: Texts | None = Field(
        None, description="TEI's: a text or several, with TEI's answer, by an encoder."
    )
    prompt_name: PromptName = None


class DetokenizeRequest(NullIsAbsent):
    """Token ids to be turned into text."""

    model: StrictStr | None = Field(
        None, description="Default: the first that generates, else the first encoder."
    )
    tokens: Ids = Field(description="Token ids.")
