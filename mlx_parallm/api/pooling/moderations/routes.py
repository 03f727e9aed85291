"""``POST /v1/moderations``, by a classifier with labels of harm."""

from __future__ import annotations

from fastapi import Response

from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.error_schema import ErrorResponse
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.answer import PoolingDep
from mlx_parallm.api.pooling.inputs.encode import single_inputs
from mlx_parallm.api.pooling.moderations.answer import moderated, moderator
from mlx_parallm.api.pooling.moderations.schema import ModerationRequest

routes = Routes(POOLING, body_limit=INPUT, short=True, in_any_process=True)


@routes.post(
    "/v1/moderations",
    batchable=True,
    responses={501: {"model": ErrorResponse, "description": "No such classifier is loaded."}},
)
async def create_moderation(body: ModerationRequest, pooling: PoolingDep) -> Response:
    """Say of each text whether it is harmful, and how."""
    call = pooling.call(moderator(pooling.client, body.model), body.model, "modr")
    return await call.respond(await single_inputs(body.input, call.model, "classify"), moderated)
