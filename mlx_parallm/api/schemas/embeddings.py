"""The body of ``POST /v1/embeddings``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, StrictInt

from mlx_parallm.api.schemas.encode import TextsRequest


class EmbeddingsRequest(TextsRequest):
    """OpenAI's, with vLLM's fields."""

    encoding_format: Literal["float", "base64"] = Field(
        "float", description="Numbers, or the bytes of little-endian float32 in base64."
    )
    dimensions: StrictInt | None = Field(
        None, ge=1, description="Length that vectors are cut to, where the model allows it."
    )
