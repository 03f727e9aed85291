"""``POST /v1/embeddings``."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from mlx_parallm.api.convert.array_encoding import check_format
from mlx_parallm.api.convert.embeddings import check_dimensions, embeddings_response
from mlx_parallm.api.convert.input_prompts import asked_prompt
from mlx_parallm.api.convert.request_inputs import request_inputs
from mlx_parallm.api.dependencies import EngineDep
from mlx_parallm.api.encoder_answer import Encoding, encoded_response
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
        inputs=await request_inputs(body, model, "embed", prompt=asked_prompt(body, model.info)),
        request_id=f"embd-{body.request_id or request.state.answer_id}",
    )
    check_format(body, len(asked.inputs))
    return await encoded_response(
        request, engine, asked, lambda found: embeddings_response(found, body)
    )
