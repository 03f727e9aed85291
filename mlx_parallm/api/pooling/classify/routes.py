"""``POST /classify``, in vLLM's shape."""

from __future__ import annotations

from fastapi import Request, Response
from starlette.responses import JSONResponse

from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.dependencies import EngineDep
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.answer import Encoding, encoded_response
from mlx_parallm.api.pooling.classify.answer import classified
from mlx_parallm.api.pooling.classify.schema import ClassifyRequest
from mlx_parallm.api.pooling.inputs.request import request_inputs

routes = Routes(POOLING, body_limit=INPUT, short=True)


# SGLang has the first with the prefix of OpenAI's routes.
@routes.post("/v1/classify")
@routes.post("/v1/classifications", include_in_schema=False)
async def classify(body: ClassifyRequest, request: Request, engine: EngineDep) -> Response:
    """The likeliest label of each text, and the probabilities of all labels."""
    model = engine.encoders.get(body.model, "classify")
    asked = Encoding(
        model=model,
        name=body.model or model.names[0],
        inputs=await request_inputs(body, model, "classify"),
        request_id=f"classify-{body.request_id or request.state.answer_id}",
    )
    return await encoded_response(
        request,
        engine,
        asked,
        lambda found: JSONResponse(
            classified(found, use_activation=body.use_activation is not False)
        ),
    )
