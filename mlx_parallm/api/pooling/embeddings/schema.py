"""The bodies of ``POST /v1/embeddings`` and ``POST /pooling``."""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, Field, StrictBool, StrictInt, StrictStr

from mlx_parallm.api.pooling.inputs.schema import TextsRequest


class ArraysRequest(TextsRequest):
    """How what is made of each input is written."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] = Field(
        "float",
        description="Numbers; base64 of the bytes of numbers; or the bytes alone as the body, "
        "with or without a header `metadata` that says what they are.",
    )
    embed_dtype: Literal["float32", "float16", "bfloat16"] = Field(
        "float32", description="Of numbers that are given as bytes."
    )
    endianness: Literal["native", "little", "big"] = Field(
        "native", description="Of numbers that are given as bytes; native is little."
    )
    dimensions: StrictInt | None = Field(
        None, ge=1, description="Length that vectors are cut to, where the model allows it."
    )
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
        description="What the texts are for, such as query or document, as Cohere, NVIDIA, Voyage "
        "and (as task) Jina have it: the model's prompt for that is put before them.",
    )
    prompt_name: StrictStr | None = Field(
        None, description="The name of a prompt of the model, which is put before the texts."
    )
    prompt: StrictStr | None = Field(None, description="A text to be put before the texts.")


class PoolingRequest(ArraysRequest):
    """vLLM's ``POST /pooling``."""

    task: Literal["embed", "token_embed", "classify", "token_classify"] | None = Field(
        None, description="By default what the model was made for."
    )
    input_type: Literal["query", "document"] | None = Field(
        None, description="Of token_embed: texts are read to be compared by their tokens."
    )
