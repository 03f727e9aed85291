"""The bodies of ``POST /v1/embeddings`` and ``POST /pooling``."""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, Field, StrictBool, StrictStr

from mlx_parallm.api.pooling.inputs.schema import Dimensions, PromptName, TextsRequest


class ArraysRequest(TextsRequest):
    """The fields that choose the form of each input's array."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] = Field(
        "float",
        description="Numbers; base64 of the bytes of numbers; or the bytes alone as the body, "
        "with or without a header `metadata` that says what they are.",
    )
    embed_dtype: Literal["float32", "float16", "bfloat16"] = Field(
        "float32", description="Type of numbers as bytes."
    )
    endianness: Literal["native", "little", "big"] = Field(
        "native", description="Byte order of numbers as bytes; native is little."
    )
    dimensions: Dimensions = None
    use_activation: StrictBool | None = Field(
        None,
        validation_alias=AliasChoices("use_activation", "normalize"),
        description="Divide vectors by their lengths, make probabilities of logits. Vectors: as "
        "the model's files say by default; probabilities: true. Also as normalize.",
    )


class EmbeddingsRequest(ArraysRequest):
    """OpenAI's, with vLLM's fields, and the prompts of sentence-transformers."""

    input_type: StrictStr | None = Field(
        None,
        validation_alias=AliasChoices("input_type", "task"),
        description="Use of the texts, such as query or document, as in Cohere, NVIDIA, Voyage "
        "and (as task) Jina: the model's prompt for that use precedes them.",
    )
    prompt_name: PromptName = None
    prompt: StrictStr | None = Field(None, description="A text that precedes the texts.")


class PoolingRequest(ArraysRequest):
    """vLLM's ``POST /pooling``."""

    task: Literal["embed", "token_embed", "classify", "token_classify"] | None = Field(
        None, description="Default: the model's main task."
    )
    input_type: Literal["query", "document"] | None = Field(
        None, description="For token_embed: read texts for comparison by their tokens."
    )
