"""Bodies of Ollama's routes. Its API document and its Python client 0.6 are the authority."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
)

from mlx_parallm.api.http.forms import INT64, MAX_MESSAGES, NullIsAbsent, Number, OpenForm
from mlx_parallm.api.http.keep_alive import KeepAlive
from mlx_parallm.api.pooling.inputs.schema import Dimensions, Texts
from mlx_parallm.api.turns.fields import ANY_GENERATOR, MAX_STOPS
from mlx_parallm.api.turns.images import ImageUrls

#: Settings of llama.cpp's memory and threads, which clients send routinely.
OF_THE_LOADER = frozenset(
    [
        *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa"),
        *("low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap", "use_mlock"),
        "embedding_only",
    ]
)


class Options(OpenForm):
    """Settings of sampling, and of llama.cpp."""

    without_effect = OF_THE_LOADER

    num_predict: StrictInt = Field(
        -1, ge=-2, lt=INT64, description="Most tokens to generate; 0, -1 and -2 are no limit."
    )
    temperature: Number = Field(0.8, ge=0, le=2, description="0 is greedy.")
    top_k: StrictInt = Field(40, ge=-1, description="0 keeps all tokens.")
    top_p: Number = Field(0.9, ge=0, le=1, description="Keep the likeliest of this mass.")
    min_p: Number = Field(
        0.0, ge=0, le=1, description="Keep tokens at least this share as likely as the likeliest."
    )
    seed: StrictInt | None = Field(
        None, ge=-INT64, lt=INT64, description="Fixes the answer; a negative one does not."
    )
    stop: StrictStr | list[StrictStr] | None = Field(
        None, description=f"Up to {MAX_STOPS} texts that end the answer."
    )
    repeat_penalty: Number = Field(
        1.0, gt=0, le=100, description="Over 1 makes tokens of prompt and output less likely."
    )
    presence_penalty: Number = Field(
        0.0, ge=-2, le=2, description="Subtracted once from tokens generated before."
    )
    frequency_penalty: Number = Field(
        0.0, ge=-2, le=2, description="Subtracted per occurrence of a token generated before."
    )


class NamingRequest(OpenForm):
    """A body that names a model; ``:latest`` behind a name may be left out."""

    model: StrictStr | None = Field(
        None, validation_alias=AliasChoices("model", "name"), description=ANY_GENERATOR
    )


class ModelRequest(NamingRequest):
    """A body for a model that stays in memory for a while."""

    options: Options = Field(
        default_factory=lambda: Options.model_validate({}), description="Settings of the model."
    )
    keep_alive: KeepAlive = None


class GenerationFields(ModelRequest):
    """Fields that chats and texts share."""

    stream: StrictBool = Field(True, description="Answer by lines of JSON.")
    format: Any = Field(None, description='"json", or a JSON schema that the answer matches.')
    think: StrictBool | Literal["low", "medium", "high"] | None = Field(
        None, description="Whether, or how much, the model thinks before it answers."
    )
    logprobs: StrictBool = Field(False, description="Log-probabilities of the output tokens.")
    top_logprobs: StrictInt = Field(0, ge=0, description="Alternatives per token; need logprobs.")


class OllamaMessage(NullIsAbsent):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"] = Field(description="Whose turn it is.")
    content: StrictStr | list[dict[str, Any]] = Field(
        "", description="A text, or OpenAI's parts of type text."
    )
    thinking: StrictStr | None = Field(None, description="Thoughts of an earlier answer.")
    images: ImageUrls = Field(default_factory=list[str], description="Images in base64.")
    tool_calls: list[dict[str, Any]] = Field(
        default_factory=list[dict[str, Any]],
        description="Calls of an assistant; arguments are an object, or its JSON.",
    )
    tool_name: StrictStr | None = Field(
        None,
        validation_alias=AliasChoices("tool_name", "name"),
        description="The tool whose result this is.",
    )
    tool_call_id: StrictStr | None = Field(None, description="The call whose result this is.")


class OllamaChatRequest(GenerationFields):
    """A conversation to be continued; without messages the model is only loaded."""

    messages: list[OllamaMessage] = Field(
        default_factory=list[OllamaMessage],
        max_length=MAX_MESSAGES,
        description="The conversation so far.",
    )
    tools: list[dict[str, Any]] = Field(
        default_factory=list[dict[str, Any]], description="Functions that the model may call."
    )


class OllamaGenerateRequest(GenerationFields):
    """A text to be answered or continued; without one the model is only loaded."""

    prompt: StrictStr = Field("", description="What the user says; with raw, the whole prompt.")
    suffix: StrictStr = Field("", description="What follows the gap that the model fills in.")
    system: StrictStr = Field("", description="What comes before the prompt.")
    images: ImageUrls = Field(default_factory=list[str], description="Images in base64.")
    raw: StrictBool = Field(False, description="Leave out the chat template.")
    template: StrictStr = Field("", description="Refused: see --chat-template.")
    context: list[StrictInt] = Field(
        default_factory=list[int], description="Refused: use /api/chat."
    )


class OllamaEmbedRequest(ModelRequest):
    """Texts to be embedded."""

    input: Texts = Field(description="A text or several.")
    truncate: StrictBool = Field(True, description="Cut texts that are too long, else 400.")
    dimensions: Dimensions = None


class OllamaEmbeddingRequest(ModelRequest):
    """A text to be embedded, in the older form."""

    prompt: StrictStr = Field("", description="The text.")


class ShowRequest(NamingRequest):
    """A model to be described."""

    verbose: StrictBool = Field(False, description="Accepted and ignored.")


class OllamaError(BaseModel):
    """Ollama's error object."""

    error: str = Field(description="A sentence for people.")
