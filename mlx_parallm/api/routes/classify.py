"""``POST /classify``, in vLLM's shape."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse

from mlx_parallm.api.convert.classify import classified
from mlx_parallm.api.convert.request_inputs import request_inputs
from mlx_parallm.api.dependencies import EngineDep
from mlx_parallm.api.encoder_answer import Encoding, encoded_response
from mlx_parallm.api.json_body import JsonRoute
from mlx_parallm.api.schemas.classify import ClassifyRequest

router = APIRouter(route_class=JsonRoute)


# SGLang has the first with the prefix of OpenAI's routes.
@router.post("/classify")
@router.post("/classifications", include_in_schema=False)
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
