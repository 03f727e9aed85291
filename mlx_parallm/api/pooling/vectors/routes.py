"""``POST /pooling``, in vLLM's shape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import Response

from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.answer import Encoded, PoolingDep
from mlx_parallm.api.pooling.embeddings.answer import check_dimensions
from mlx_parallm.api.pooling.embeddings.array_encoding import BYTES, arrays_answer, check_format
from mlx_parallm.api.pooling.embeddings.schema import PoolingRequest
from mlx_parallm.api.pooling.inputs.request import request_inputs
from mlx_parallm.api.pooling.late_interaction import side_inputs, side_vectors
from mlx_parallm.api.pooling.vectors.answer import POOLING_TASKS, pooling_task
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInput, Task

routes = Routes(POOLING, body_limit=INPUT, short=True, in_any_process=True)


@routes.post("/v1/pooling", responses=BYTES)
async def pool(body: PoolingRequest, pooling: PoolingDep) -> Response:
    """Return a vector, or probabilities of labels, for each text or for each of its tokens."""
    tasks = (body.task,) if body.task else POOLING_TASKS
    call = pooling.open("pool", body.model, *tasks, own_id=body.request_id)
    task = pooling_task(body, call.model.info)
    check_dimensions(body.dimensions, call.model)
    inputs = await _inputs(body, call.model, task)
    check_format(body, len(inputs))

    def answer(encoded: Encoded) -> dict[str, Any] | Response:
        return arrays_answer(_compared(encoded, body), body, kind="pooling", field="data")

    return await call.respond(inputs, answer)


async def _inputs(
    body: PoolingRequest, model: PoolingModel, task: Task
) -> tuple[PoolingInput, ...]:
    if body.input_type is None:
        return await request_inputs(body, model, task)
    if task != "token_embed" or body.input is None or body.messages is not None:
        raise InvalidRequestError(
            "input_type works only with the task token_embed and with input.", param="input_type"
        )
    if body.truncation_side == "left":
        # Cutting would remove the marker of the side.
        raise InvalidRequestError(
            "truncation_side must be right with input_type.", param="truncation_side"
        )
    if body.add_special_tokens is False:
        raise InvalidRequestError(
            "add_special_tokens must be true with input_type.", param="add_special_tokens"
        )
    if model.info.late is None or not isinstance(body.input[0], str):
        raise InvalidRequestError(
            "input_type works only with texts and with models of late interaction.",
            param="input_type",
        )
    return await side_inputs(body.input, model, body.input_type, body.reading("input"))


def _compared(encoded: Encoded, body: PoolingRequest) -> Encoded:
    """Return the results with only those tokens that count when texts are compared."""
    late = encoded.call.model.info.late
    if body.input_type is None or late is None:
        return encoded
    pairs = zip(encoded.inputs, encoded.results, strict=True)
    results = [side_vectors(each, result, body.input_type, late) for each, result in pairs]
    return replace(encoded, results=results)
