"""``POST /classify``, in vLLM's shape."""

from __future__ import annotations

from typing import Any

from fastapi import Response
from pydantic import Field, StrictBool

from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.answer import Encoded, PoolingDep
from mlx_parallm.api.pooling.embeddings.answer import finished
from mlx_parallm.api.pooling.inputs.request import request_inputs
from mlx_parallm.api.pooling.inputs.schema import TextsRequest

routes = Routes(POOLING, body_limit=INPUT, short=True, in_any_process=True)


class ClassifyRequest(TextsRequest):
    """vLLM's ``POST /classify``."""

    use_activation: StrictBool | None = Field(
        None, description="False: the logits in place of probabilities."
    )


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


def classified(encoded: Encoded, *, use_activation: bool | None) -> dict[str, Any]:
    """Return the likeliest label of each text, and the probabilities of all labels in order."""
    info = encoded.call.model.info
    rows = finished(encoded.results, "classify", info, use_activation=use_activation)
    return encoded.answer(
        [
            {
                "index": index,
                "label": info.labels[int(row.argmax())],
                "probs": row.tolist(),
                "num_classes": len(row),
            }
            for index, row in enumerate(rows)
        ]
    )
