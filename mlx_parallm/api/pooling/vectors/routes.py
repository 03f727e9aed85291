"""``POST /pooling``, in vLLM's shape."""

from __future__ import annotations

from dataclasses import replace

from fastapi import Request, Response

from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.dependencies import EngineDep
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.answer import Encoded, Encoding, encoded_response
from mlx_parallm.api.pooling.embeddings.answer import check_dimensions
from mlx_parallm.api.pooling.embeddings.array_encoding import check_format
from mlx_parallm.api.pooling.embeddings.schema import PoolingRequest
from mlx_parallm.api.pooling.inputs.request import request_inputs
from mlx_parallm.api.pooling.late_interaction import side_inputs, side_vectors
from mlx_parallm.api.pooling.vectors.answer import POOLING_TASKS, pooling_response, pooling_task
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import EncodeInput, Task

routes = Routes(POOLING, body_limit=INPUT, short=True)


@routes.post("/v1/pooling")
async def pool(body: PoolingRequest, request: Request, engine: EngineDep) -> Response:
    """A vector, or probabilities of labels, for each text or for each of its tokens."""
    model = engine.encoders.get(body.model, *((body.task,) if body.task else POOLING_TASKS))
    task = pooling_task(body, model.info)
    check_dimensions(body.dimensions, model)
    asked = Encoding(
        model=model,
        name=body.model or model.names[0],
        inputs=await _inputs(body, model, task),
        request_id=f"pool-{body.request_id or request.state.answer_id}",
    )
    check_format(body, len(asked.inputs))
    return await encoded_response(
        request, engine, asked, lambda found: pooling_response(_counting(found, body), body, task)
    )


async def _inputs(body: PoolingRequest, model: PoolingModel, task: Task) -> tuple[EncodeInput, ...]:
    if body.input_type is None:
        return await request_inputs(body, model, task)
    if task != "token_embed" or body.input is None or body.messages is not None:
        raise InvalidRequestError("input_type is for token_embed of input.", param="input_type")
    if body.truncation_side == "left":
        # The mark of the side would be cut off.
        raise InvalidRequestError(
            "With input_type texts are cut at their ends.", param="truncation_side"
        )
    if body.add_special_tokens is False:
        raise InvalidRequestError(
            "With input_type texts have their special tokens.", param="add_special_tokens"
        )
    return await side_inputs(
        body.input, model, body.input_type, truncate=body.truncate_prompt_tokens
    )


def _counting(found: Encoded, body: PoolingRequest) -> Encoded:
    """The same with those tokens alone that count when texts are compared."""
    late = found.model.info.late
    if body.input_type is None or late is None:
        return found
    pairs = zip(found.inputs, found.results, strict=True)
    results = [side_vectors(one, result, body.input_type, late) for one, result in pairs]
    return replace(found, results=results)
