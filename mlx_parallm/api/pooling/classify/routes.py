"""``POST /classify``, in vLLM's shape."""

from __future__ import annotations

from fastapi import Response

from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.answer import PoolingDep
from mlx_parallm.api.pooling.classify.answer import classified
from mlx_parallm.api.pooling.classify.schema import ClassifyRequest
from mlx_parallm.api.pooling.inputs.request import request_inputs

routes = Routes(POOLING, body_limit=INPUT, short=True, in_any_process=True)


# SGLang serves /classify also with the prefix of OpenAI's routes.
@routes.post("/v1/classify")
@routes.post("/v1/classifications", include_in_schema=False)
async def classify(body: ClassifyRequest, pooling: PoolingDep) -> Response:
    """Return the likeliest label of each text, and the probabilities of all labels."""
    call = pooling.open("classify", body.model, "classify", own_id=body.request_id)
    inputs = await request_inputs(body, call.model, "classify")
    return await call.respond(
        inputs, lambda encoded: classified(encoded, use_activation=body.use_activation)
    )
