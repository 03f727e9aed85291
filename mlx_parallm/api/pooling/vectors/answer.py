"""What ``POST /pooling`` answers."""

from __future__ import annotations

import numpy as np
from starlette.responses import Response

from mlx_parallm.api.pooling.activation import activated
from mlx_parallm.api.pooling.answer import Encoded
from mlx_parallm.api.pooling.embeddings.answer import finished
from mlx_parallm.api.pooling.embeddings.array_encoding import arrays_response
from mlx_parallm.api.pooling.embeddings.schema import PoolingRequest
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInfo, Task

POOLING_TASKS: tuple[Task, ...] = ("embed", "token_embed", "classify", "token_classify")


def pooling_task(body: PoolingRequest, info: PoolingInfo) -> Task:
    """Return the task of a request; by default the first of the model that this route has.

    Raises:
        InvalidRequestError: there are fields that go with another task, or that mean plugins.
    """
    task: Task = body.task or next(each for each in info.tasks if each in POOLING_TASKS)
    if "data" in (body.model_extra or {}):
        raise InvalidRequestError(
            "data is for plugins, and there are none: send input or messages.",
            param="data",
            code="unsupported_parameter",
        )
    if body.dimensions is not None and task != "embed":
        raise InvalidRequestError(f"dimensions is not for {task}.", param="dimensions")
    return task


def pooling_response(encoded: Encoded, body: PoolingRequest, task: Task) -> Response:
    """Return vLLM's list with an array for each input, or the bytes alone."""
    info = encoded.call.model.info
    arrays = [
        finished_result(
            result, task, info, dimensions=body.dimensions, use_activation=body.use_activation
        )
        for result in encoded.results
    ]
    return arrays_response(arrays, encoded, body, kind="pooling", field="data")


def finished_result(
    result: np.ndarray,
    task: Task,
    info: PoolingInfo,
    *,
    dimensions: int | None = None,
    use_activation: bool | None = None,
) -> np.ndarray:
    """Return a result as the answer gives it: probabilities, or vectors of their final length.

    Args:
        result: of an input.
        task: of the input.
        info: of the model.
        dimensions: length of vectors, which was checked; None: the model's.
        use_activation: False: logits stay, vectors are not normalised; None: the model's way.
    """
    if task in ("classify", "token_classify"):
        return result if use_activation is False else activated(result, info.problem_type)
    if not len(result):
        # No token of the document counts.
        return result
    normalizes = info.normalizes if use_activation is None else use_activation
    rows = list(result) if task == "token_embed" else [result]
    vectors = finished(rows, dimensions, normalizes=normalizes)
    return vectors if task == "token_embed" else vectors[0]
