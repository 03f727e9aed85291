"""``POST /pooling``, in vLLM's shape."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from mlx_parallm.api.convert.array_encoding import check_format
from mlx_parallm.api.convert.embeddings import check_dimensions
from mlx_parallm.api.convert.pooling import POOLING_TASKS, pooling_response, pooling_task
from mlx_parallm.api.convert.request_inputs import request_inputs
from mlx_parallm.api.dependencies import EngineDep
from mlx_parallm.api.encoder_answer import Encoding, encoded_response
from mlx_parallm.api.ignored import tell_ignored
from mlx_parallm.api.json_body import JsonRoute
from mlx_parallm.api.schemas.embeddings import PoolingRequest

router = APIRouter(route_class=JsonRoute)


@router.post("/pooling")
async def pool(body: PoolingRequest, request: Request, engine: EngineDep) -> Response:
    """A vector, or probabilities of labels, for each text or for each of its tokens."""
    model = engine.encoders.get(body.model, *((body.task,) if body.task else POOLING_TASKS))
    task = pooling_task(body, model.info)
    check_dimensions(body.dimensions, model)
    asked = Encoding(
        model=model,
        name=body.model or model.names[0],
        inputs=await request_inputs(body, model, task),
        request_id=f"pool-{body.request_id or request.state.answer_id}",
    )
    check_format(body, len(asked.inputs))
    response = await encoded_response(
        request, engine, asked, lambda found: pooling_response(found, body, task)
    )
    tell_ignored(response, body.model_extra or ())
    return response
