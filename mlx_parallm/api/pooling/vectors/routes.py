"""``POST /classify`` and ``POST /pooling``, in vLLM's shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from fastapi import Response
from pydantic import Field, StrictBool

from mlx_parallm.api.http.declared import INPUT
from mlx_parallm.api.http.openapi import POOLING
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.pooling.answer import Encoded, PoolingDep
from mlx_parallm.api.pooling.inputs.request import request_inputs
from mlx_parallm.api.pooling.inputs.schema import TextsRequest
from mlx_parallm.api.pooling.vectors.arrays import (
    BYTES,
    ArraysRequest,
    arrays_answer,
    check_dimensions,
    check_format,
    finished,
)
from mlx_parallm.api.pooling.vectors.late_interaction import side_inputs, side_vectors
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInfo, PoolingInput, Task

routes = Routes(POOLING, body_limit=INPUT, short=True, in_any_process=True)
POOLING_TASKS: tuple[Task, ...] = ("embed", "token_embed", "classify", "token_classify")


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


class PoolingRequest(ArraysRequest):
    """vLLM's ``POST /pooling``."""

    task: Literal["embed", "token_embed", "classify", "token_classify"] | None = Field(
        None, description="Default: the model's main task."
    )
    input_type: Literal["query", "document"] | None = Field(
        None, description="For token_embed: read texts for comparison by their tokens."
    )


def pooling_task(body: PoolingRequest, info: PoolingInfo) -> Task:
    """Return the task of a request; by default the model's first that this route serves.

    Raises:
        InvalidRequestError: a field belongs to another task, or to plugins.
    """
    task: Task = body.task or next(each for each in info.tasks if each in POOLING_TASKS)
    if "data" in (body.model_extra or {}):
        raise InvalidRequestError(
            "data is not supported, because there are no plugins: send input or messages.",
            param="data",
            code="unsupported_parameter",
        )
    if body.dimensions is not None and task != "embed":
        raise InvalidRequestError(f"dimensions is not supported for {task}.", param="dimensions")
    return task


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
