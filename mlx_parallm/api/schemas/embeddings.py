"""The body of ``POST /v1/embeddings``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, StrictInt, StrictStr, WithJsonSchema

from mlx_parallm.api.schemas.common import NullIsAbsent

#: OpenAI takes 2,048.
MAX_INPUTS = 8192
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_MANY = {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS}
_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {**_MANY, "items": {"type": "string"}},
        _IDS,
        {**_MANY, "items": _IDS},
    ]
}


def _inputs(value: Any) -> list[str] | list[list[int]]:
    """Every input, as texts or as ids; one message for whatever else there is."""
    given = [value] if isinstance(value, str) or _is_ids(value) else value
    is_list = isinstance(given, list) and 0 < len(given) <= MAX_INPUTS
    if is_list and (all(isinstance(one, str) for one in given) or all(map(_is_ids, given))):
        return given
    raise ValueError(
        f"must be a text, a list of 1 to {MAX_INPUTS} texts, token ids, or a list of lists of ids"
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


class EmbeddingsRequest(NullIsAbsent):
    """OpenAI's, with vLLM's ``truncate_prompt_tokens`` and ``add_special_tokens``."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    input: Annotated[Any, BeforeValidator(_inputs), WithJsonSchema(_SCHEMA)] = Field(
        description="A text or several, or the token ids of one or of several."
    )
    model: StrictStr | None = Field(None, description="An encoder; the first one by default.")
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="Numbers, or the bytes of little-endian float32 in base64."
    )
    dimensions: StrictInt | None = Field(
        None, ge=1, description="Length that vectors are cut to, where the model allows it."
    )
    truncate_prompt_tokens: StrictInt | None = Field(
        None, ge=-1, description="Cut inputs to so many tokens; -1 to what the model takes."
    )
    request_id: StrictStr | None = Field(None, description="Part of the answer's id.")
    user: StrictStr | None = Field(None, description="Not read.")
