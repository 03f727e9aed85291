"""Bodies of ``POST /tokenize`` and ``POST /detokenize``, in vLLM's shape."""

from __future__ import annotations

from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from mlx_parallm.api.schemas.chat import ChatMessage


class TokenizeRequest(BaseModel):
    """A text (``prompt`` or llama.cpp's ``content``) or a conversation."""

    model_config = ConfigDict(extra="ignore")

    model: StrictStr | None = Field(None, description="Default: the first model.")
    prompt: StrictStr | None = Field(None, validation_alias=AliasChoices("prompt", "content"))
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_special_tokens: StrictBool | None = None
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    return_token_strs: StrictBool | None = False


class DetokenizeRequest(BaseModel):
    """Token ids to be turned into text."""

    model_config = ConfigDict(extra="ignore")

    model: StrictStr | None = Field(None, description="Default: the first model.")
    tokens: list[StrictInt]
