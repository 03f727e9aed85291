"""Bodies and answers of the routes that show a request without running it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field, StrictBool, StrictStr

from mlx_parallm.api.chat.schema import Messages
from mlx_parallm.api.http.forms import NullIsAbsent
from mlx_parallm.api.turns.fields import TemplateKwargs


class RenderedRequest(BaseModel):
    """The engine's request for one prompt, in vLLM's names."""

    request_id: str = Field(description="The id of the engine's request.")
    model: str = Field(description="The model's first name.")
    prompt: str = Field(description="The prompt's text; empty if it came as token ids.")
    token_ids: list[int] = Field(description="The prompt's token ids.")
    sampling_params: dict[str, Any] = Field(description="How tokens would be chosen.")
    priority: int = Field(description="Lower runs first.")
    cache_salt: str | None = Field(description="Share cached prefixes only with the same salt.")


class TemplateRequest(NullIsAbsent):
    """llama.cpp's body of ``/apply-template``."""

    model: StrictStr | None = Field(None, description="Default: the first model.")
    messages: Messages = Field(description="A conversation.")
    tools: list[dict[str, Any]] | None = Field(None, description="Tools for the template.")
    add_generation_prompt: StrictBool = Field(True, description="Open the assistant's turn.")
    chat_template_kwargs: TemplateKwargs


class AppliedTemplate(BaseModel):
    """llama.cpp's answer of ``/apply-template``."""

    prompt: str = Field(description="The conversation as text.")
