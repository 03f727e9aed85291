"""``POST /v1/embeddings``."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from mlx_parallm.api.convert.embeddings import answer, check_dimensions, finished
from mlx_parallm.api.convert.encode_inputs import single_inputs
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
    model = engine.encoders.get(body.model, "embed")
    check_dimensions(body.dimensions, model)
    asked = EncodeRequest(
        request_id=f"embd-{body.request_id or request.state.answer_id}",
        model=model.names[0],
        inputs=await single_inputs(
            body.input, model, "embed", truncate=body.truncate_prompt_tokens
        ),
    )

    async def respond() -> Response:
        found = await engine.encoders.encode(asked)
        num_tokens = sum(len(one.token_ids) for one in asked.inputs)
        name = body.model or model.names[0]

        def write() -> Response:
            vectors = finished(found, body.dimensions, normalizes=model.info.normalizes)
            return JSONResponse(answer(vectors, body, name, num_tokens))

        # Thousands of vectors take long to write.
        return await asyncio.to_thread(write)

    response = await unless_disconnected(request, respond())
    tell_ignored(response, body.model_extra or ())
    return response
