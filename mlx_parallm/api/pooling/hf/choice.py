"""The task of a body, and the model for it."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mlx_parallm.api.pooling.hf.fill_mask import fill_mask
from mlx_parallm.api.pooling.hf.job import Job
from mlx_parallm.api.pooling.hf.schema import TaskParameters
from mlx_parallm.api.pooling.hf.text_classification import text_classification
from mlx_parallm.api.pooling.hf.token_classification import token_classification
from mlx_parallm.api.pooling.inputs.request import prompted_inputs
from mlx_parallm.api.pooling.inputs.schema import MAX_INPUTS
from mlx_parallm.api.pooling.mlm.inputs import num_masks
from mlx_parallm.api.pooling.vectors.arrays import (
    as_bytes,
    check_dimensions,
    finished,
    similarities,
)
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.serving.interface import PoolingClient
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_list, is_object
from mlx_parallm.types.pooling import Task


async def feature_extraction(job: Job) -> list[Any]:
    """Return a list with a vector for each text, also for a text alone.

    Raises:
        ParallmError: see ``Job.texts``, ``single_inputs`` and ``PoolingCall.written``.
    """
    vectors = await _vectors(job, job.texts())
    if job.parameters.encoding_format == "base64":
        return [base64.b64encode(as_bytes(vector)).decode() for vector in vectors]
    return [vector.tolist() for vector in vectors]


async def sentence_similarity(job: Job) -> list[float]:
    """Return the cosine of each sentence with the source sentence.

    Raises:
        ParallmError: ``inputs`` lacks the sentences; see also ``feature_extraction``.
    """
    content = job.inputs if is_object(job.inputs) else {}
    source, sentences = content.get("source_sentence"), content.get("sentences")
    if not isinstance(source, str) or not is_list(sentences) or not 0 < len(sentences) < MAX_INPUTS:
        raise InvalidRequestError(
            "inputs must have source_sentence, a text, and sentences, a list of texts.",
            param="inputs",
        )
    return similarities(await _vectors(job, job.texts([source, *sentences])))


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


async def _vectors(job: Job, texts: Sequence[str]) -> Sequence[np.ndarray]:
    """Return vectors as the parameters say, float32 ``[dimensions]`` each."""
    model, parameters = job.call.model, job.parameters
    check_dimensions(parameters.dimensions, model)
    inputs = await prompted_inputs(texts, model, "embed", job.reading, parameters.prompt_name)
    vectors, _ = await job.call.written(inputs, lambda _, result: result)
    options = (parameters.dimensions, parameters.normalize)
    return finished(vectors, "embed", model.info, *options)
