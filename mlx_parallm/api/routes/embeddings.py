"""``POST /v1/embeddings``."""

from __future__ import annotations

from fastapi import Request, Response

from mlx_parallm.api.convert.array_encoding import check_format
from mlx_parallm.api.convert.embeddings import check_dimensions, embeddings_response
from mlx_parallm.api.convert.input_prompts import asked_prompt
from mlx_parallm.api.convert.request_inputs import request_inputs
from mlx_parallm.api.declared import INPUT
from mlx_parallm.api.dependencies import EngineDep
from mlx_parallm.api.encoder_answer import Encoding, encoded_response
from mlx_parallm.api.openapi import POOLING
from mlx_parallm.api.routing import Routes
from mlx_parallm.api.schemas.embeddings import EmbeddingsRequest

routes = Routes(POOLING, body_limit=INPUT, short=True)


@routes.post("/v1/embeddings", batchable=True)
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
