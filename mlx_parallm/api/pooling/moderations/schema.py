"""The body of ``POST /v1/moderations``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictStr, WithJsonSchema

from mlx_parallm.api.http.forms import OpenForm
from mlx_parallm.api.pooling.inputs.schema import MAX_INPUTS

_TEXT = {"type": "string", "minLength": 1}
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "required": ["type", "text"],
}
_MANY = {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS}
_SCHEMA = {"anyOf": [_TEXT, {**_MANY, "items": _TEXT}, {**_MANY, "items": _PART}]}


def _texts(value: Any) -> list[str]:
    """Every text that gets a verdict of its own: parts have one together."""
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not 0 < len(given) <= MAX_INPUTS:
        given = None
    elif all(isinstance(one, dict) for one in given):
        given = ["\n".join(_part(one) for one in given)]
    if given is not None and all(isinstance(one, str) and one for one in given):
        return given
    raise ValueError(
        f"must be a text, or a list of 1 to {MAX_INPUTS} texts or of parts of type text; none empty"
    )


def _part(part: Any) -> str:
    text = part.get("text")
    if part.get("type") != "text" or not isinstance(text, str):
        raise ValueError('of parts only {"type": "text", "text": …} can be read')
    return text


class ModerationRequest(OpenForm):
    """OpenAI's."""

    input: Annotated[list[str], BeforeValidator(_texts), WithJsonSchema(_SCHEMA)] = Field(
        description="A text, several, or the parts of one."
    )
    model: StrictStr | None = Field(
        None, description="A classifier; by default the first that tells what is harmful."
    )
