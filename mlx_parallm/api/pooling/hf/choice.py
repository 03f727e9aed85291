"""Which task a body asks for, and which model does it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from mlx_parallm.api.pooling.hf.fill_mask import fill_mask
from mlx_parallm.api.pooling.hf.job import Done, Job
from mlx_parallm.api.pooling.hf.schema import TaskParameters
from mlx_parallm.api.pooling.hf.text_classification import text_classification
from mlx_parallm.api.pooling.hf.token_classification import token_classification
from mlx_parallm.api.pooling.hf.vectors import feature_extraction, sentence_similarity
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.serving.interface import PoolingClient
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_list
from mlx_parallm.types.pooling import Task

Run = Callable[[Job], Awaitable[Done]]

#: What a model must be able to do, and what does it, by Hugging Face's names.
TASKS: Mapping[str, tuple[Task, Run]] = {
    "fill-mask": ("mlm", fill_mask),
    "text-classification": ("classify", text_classification),
    "sentiment-analysis": ("classify", text_classification),
    "token-classification": ("token_classify", token_classification),
    "ner": ("token_classify", token_classification),
    "feature-extraction": ("embed", feature_extraction),
    "sentence-similarity": ("embed", sentence_similarity),
}
#: What a model was made for, by Hugging Face's names.
DEFAULTS: Mapping[Task, str] = {
    "mlm": "fill-mask",
    "classify": "text-classification",
    "token_classify": "token-classification",
    "embed": "feature-extraction",
}
#: Parameters that one task alone has.
TELLING: Mapping[str, str] = {
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
    """Return the model, and what it shall do.

    The task is the one of the path, or what the body tells, or what the model was made for. Without
    a name it is the first model that can do the task, or whose mask token a text has, or the first.

    Raises:
        ModelNotFoundError, InvalidRequestError: there is no such model; it cannot do the task; the
            task is not known.
    """
    if task is None:
        task = _told(inputs, parameters)
    if task is not None:
        if task not in TASKS:
            raise InvalidRequestError(f"The task is one of {', '.join(TASKS)}.", param="task")
        needed, run = TASKS[task]
        return client.get(name, needed), run
    model = _first(client, inputs) if name is None else client.get(name, *DEFAULTS)
    made_for = [DEFAULTS.get(task) for task in model.info.tasks]
    return model, next(TASKS[task][1] for task in made_for if task is not None)


def _told(inputs: Any, parameters: TaskParameters) -> str | None:
    if isinstance(inputs, dict):
        return "sentence-similarity" if "sentences" in inputs else "text-classification"
    names = parameters.model_fields_set
    return next((task for field, task in TELLING.items() if field in names), None)


def _first(client: PoolingClient, inputs: Any) -> PoolingModel:
    text = inputs[0] if is_list(inputs) and inputs else inputs
    for model in client.models():
        token = model.tokenizer.mask_token
        if "mlm" in model.info.tasks and token and isinstance(text, str) and token in text:
            return model
    return client.get(None, *DEFAULTS)
