"""The task of a body, and the model for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from mlx_parallm.api.pooling.hf.fill_mask import fill_mask
from mlx_parallm.api.pooling.hf.job import Job
from mlx_parallm.api.pooling.hf.schema import TaskParameters
from mlx_parallm.api.pooling.hf.text_classification import text_classification
from mlx_parallm.api.pooling.hf.token_classification import token_classification
from mlx_parallm.api.pooling.hf.vectors import feature_extraction, sentence_similarity
from mlx_parallm.api.pooling.mlm.inputs import num_masks
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.serving.interface import PoolingClient
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_list
from mlx_parallm.types.pooling import Task

#: Does a task and returns the JSON of its answer.
Run = Callable[[Job], Awaitable[Any]]

#: The task that a model must be able to do, and its function, by Hugging Face's names.
TASKS: Mapping[str, tuple[Task, Run]] = {
    "fill-mask": ("mlm", fill_mask),
    "text-classification": ("classify", text_classification),
    "sentiment-analysis": ("classify", text_classification),
    "token-classification": ("token_classify", token_classification),
    "ner": ("token_classify", token_classification),
    "feature-extraction": ("embed", feature_extraction),
    "sentence-similarity": ("embed", sentence_similarity),
}
#: Hugging Face's first name of each task.
DEFAULTS: Mapping[Task, str] = {task: name for name, (task, _) in reversed(TASKS.items())}
#: Parameters that only one task has.
TASK_OF_PARAMETER: Mapping[str, str] = {
    "targets": "fill-mask",
    "function_to_apply": "text-classification",
    "aggregation_strategy": "token-classification",
    "ignore_labels": "token-classification",
    "normalize": "feature-extraction",
    "prompt_name": "feature-extraction",
    "dimensions": "feature-extraction",
    "encoding_format": "feature-extraction",
}


def choose(
    client: PoolingClient,
    inputs: Any,
    parameters: TaskParameters,
    *,
    name: str | None = None,
    task: str | None = None,
) -> tuple[PoolingModel, Run]:
    """Return the model, and the function of the task.

    The task is that of the path, else the one that the body implies, else the model's main one.
    Without a name, the model is the first that can do the task; without a task, the first whose
    mask token is in the text, else the first of all.

    Raises:
        ModelNotFoundError, InvalidRequestError: there is no such model, it cannot do the task, or
            the task is unknown.
    """
    task = task or _implied_task(inputs, parameters)
    if task is None:
        model = _first(client, inputs) if name is None else client.get(name, *DEFAULTS)
        default = next(DEFAULTS[each] for each in model.info.tasks if each in DEFAULTS)
        return model, TASKS[default][1]
    if task not in TASKS:
        raise InvalidRequestError(f"The task must be one of {', '.join(TASKS)}.", param="task")
    needed, run = TASKS[task]
    return client.get(name, needed), run


def _implied_task(inputs: Any, parameters: TaskParameters) -> str | None:
    """Return the task that the body's inputs or parameters belong to; None: any task."""
    if isinstance(inputs, dict):
        return "sentence-similarity" if "sentences" in inputs else "text-classification"
    names = parameters.model_fields_set
    return next((task for field, task in TASK_OF_PARAMETER.items() if field in names), None)


def _first(client: PoolingClient, inputs: Any) -> PoolingModel:
    text = inputs[0] if is_list(inputs) and inputs else inputs
    for model in client.models():
        if "mlm" in model.info.tasks and isinstance(text, str) and num_masks(text, model):
            return model
    return client.get(None, *DEFAULTS)
