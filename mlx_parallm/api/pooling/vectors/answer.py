"""The task of ``POST /pooling``."""

from __future__ import annotations

from mlx_parallm.api.pooling.embeddings.schema import PoolingRequest
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInfo, Task

POOLING_TASKS: tuple[Task, ...] = ("embed", "token_embed", "classify", "token_classify")


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
