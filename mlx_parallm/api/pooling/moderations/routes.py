"""``POST /v1/moderations``, where a classifier of what is harmful is served."""

from __future__ import annotations

from fastapi import Request, Response
from starlette.responses import JSONResponse

from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.dependencies import EngineDep
from mlx_parallm.api.http.error_schema import ErrorResponse
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.answer import Encoding, encoded_response
from mlx_parallm.api.pooling.inputs.encode import single_inputs
from mlx_parallm.api.pooling.moderations.answer import moderated, moderator
from mlx_parallm.api.pooling.moderations.schema import ModerationRequest

routes = Routes(POOLING, body_limit=INPUT, short=True)


@routes.post(
    "/v1/moderations",
    batchable=True,
    responses={501: {"model": ErrorResponse, "description": "No such classifier is loaded."}},
)
async def create_moderation(
    body: ModerationRequest, request: Request, engine: EngineDep
) -> Response:
    """What of each text is harmful."""
    model = moderator(engine.encoders, body.model)
    asked = Encoding(
        model=model,
        name=body.model or model.names[0],
        inputs=await single_inputs(body.input, model, "classify"),
        request_id=f"modr-{request.state.answer_id}",
    )
    return await encoded_response(
        request, engine, asked, lambda found: JSONResponse(moderated(found))
    )
