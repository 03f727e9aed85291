"""``POST /v1/embeddings``."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from mlx_parallm.api.convert.embeddings import (
    answer,
    check_dimensions,
    encode_inputs,
    shortened,
)
from mlx_parallm.api.dependencies import EngineDep
from mlx_parallm.api.generation import unless_disconnected
from mlx_parallm.api.ignored import tell_ignored
from mlx_parallm.api.json_body import JsonRoute
from mlx_parallm.api.schemas.embeddings import EmbeddingsRequest
from mlx_parallm.encode import EncodeRequest

router = APIRouter(route_class=JsonRoute)


@router.post("/embeddings")
async def create_embeddings(
    body: EmbeddingsRequest, request: Request, engine: EngineDep
) -> Response:
    """A vector for each text."""
    model = engine.get_encoder(body.model)
    check_dimensions(body.dimensions, model)
    asked = EncodeRequest(
        request_id=f"embd-{body.request_id or request.state.answer_id}",
        model=model.names[0],
        inputs=await encode_inputs(body, model),
    )

    async def respond() -> Response:
        vectors = shortened(await engine.encode(asked), body.dimensions, model)
        num_tokens = sum(map(len, asked.inputs))
        name = body.model or model.names[0]
        # Thousands of vectors take long to write.
        return await asyncio.to_thread(
            lambda: JSONResponse(answer(vectors, body, name, num_tokens))
        )

    response = await unless_disconnected(request, respond())
    tell_ignored(response, body.model_extra or ())
    return response
