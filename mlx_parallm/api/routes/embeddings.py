"""``POST /v1/embeddings``."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from mlx_parallm.api.convert.embeddings import answer, check_dimensions
from mlx_parallm.api.convert.request_inputs import request_inputs
from mlx_parallm.api.dependencies import EngineDep
from mlx_parallm.api.encoder_answer import Encoding, encoded_response
from mlx_parallm.api.ignored import tell_ignored
from mlx_parallm.api.json_body import JsonRoute
from mlx_parallm.api.schemas.embeddings import EmbeddingsRequest

router = APIRouter(route_class=JsonRoute)


@router.post("/embeddings")
async def create_embeddings(
    body: EmbeddingsRequest, request: Request, engine: EngineDep
) -> Response:
    """A vector for each text."""
    model = engine.encoders.get(body.model, "embed")
    check_dimensions(body.dimensions, model)
    asked = Encoding(
        model=model,
        name=body.model or model.names[0],
        inputs=await request_inputs(body, model, "embed"),
        request_id=f"embd-{body.request_id or request.state.answer_id}",
    )
    response = await encoded_response(
        request, engine, asked, lambda found: JSONResponse(answer(found, body))
    )
    tell_ignored(response, body.model_extra or ())
    return response
