"""``POST /v1/moderations``, by a classifier with labels of harm."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Response
from pydantic import BeforeValidator, Field, StrictStr, WithJsonSchema

from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.error_schema import ErrorResponse
from mlx_parallm.api.http.forms import OpenForm
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.answer import PoolingDep
from mlx_parallm.api.pooling.inputs.encode import single_inputs
from mlx_parallm.api.pooling.inputs.schema import MAX_INPUTS, TEXT, as_texts, is_list_of, many
from mlx_parallm.api.pooling.moderations.answer import moderated, moderator

routes = Routes(POOLING, body_limit=INPUT, short=True, in_any_process=True)
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": TEXT},
    "required": ["type", "text"],
}
_SCHEMA = {"anyOf": [TEXT, many(TEXT), many(_PART)]}


def _texts(value: Any) -> list[str]:
    """Return every text that gets its own verdict; parts get one together."""
    if is_list_of(value, dict) and len(value) <= MAX_INPUTS:
        value = "\n".join(_part(part) for part in value)
    texts = as_texts(value)
    if texts is not None and all(texts):
        return texts
    raise ValueError(
        f"must be a text, or a list of 1 to {MAX_INPUTS} texts or of parts of type text; none empty"
    )


class ModerationRequest(OpenForm):
    """OpenAI's body."""

    input: Annotated[list[str], BeforeValidator(_texts), WithJsonSchema(_SCHEMA)] = Field(
        description="A text, several, or the parts of one."
    )
    model: StrictStr | None = Field(
        None, description="A classifier; default: the first with labels of harm."
    )


@routes.post(
    "/v1/moderations",
    batchable=True,
    responses={501: {"model": ErrorResponse, "description": "No such classifier is loaded."}},
)
async def create_moderation(body: ModerationRequest, pooling: PoolingDep) -> Response:
    """Say of each text whether it is harmful, and how."""
    call = pooling.call(moderator(pooling.client, body.model), body.model, "modr")
    return await call.respond(await single_inputs(body.input, call.model, "classify"), moderated)


def _part(part: Any) -> str:
    text = part.get("text")
    if part.get("type") != "text" or not isinstance(text, str):
        raise ValueError('parts must be of the form {"type": "text", "text": …}')
    return text
