"""Text classification: the labels of a text, or of a pair of texts, best first."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlx_parallm.api.pooling.hf.job import Job
from mlx_parallm.api.pooling.inputs.encode import pair_inputs, single_inputs
from mlx_parallm.api.pooling.inputs.schema import MAX_INPUTS, is_list_of
from mlx_parallm.api.pooling.vectors.arrays import activated, ranked_labels, softmax
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_object
from mlx_parallm.types.pooling import PoolingInput, ProblemType

#: PROBLEMS: the problem type with this function, for any number of labels.
PROBLEMS: dict[str, ProblemType] = {
    "sigmoid": "multi_label_classification",
    "none": "regression",
}


async def text_classification(job: Job) -> list[Any]:
    """Return a list of labels and scores for each text, also for a text alone.

    Raises:
        ParallmError: ``inputs`` is neither texts nor pairs; see also ``single_inputs`` and
            ``PoolingCall.written``.
    """
    inputs = await _inputs(job)
    labels = job.call.model.info.labels

    def write(_: PoolingInput, logits: np.ndarray) -> list[dict[str, Any]]:
        return ranked_labels(_scores(job, logits), labels)[: job.parameters.top_k]

    answers, _ = await job.call.written(inputs, write)
    return answers


async def _inputs(job: Job) -> tuple[PoolingInput, ...]:
    pairs: Any = [job.inputs] if is_object(job.inputs) else job.inputs
    if is_list_of(pairs, dict) and len(pairs) <= MAX_INPUTS:
        return await pair_inputs([_pair(each) for each in pairs], job.call.model, job.reading)
    return await single_inputs(job.texts(), job.call.model, "classify", job.reading)


def _pair(pair: dict[str, Any]) -> tuple[str, str]:
    first, second = pair.get("text"), pair.get("text_pair")
    if isinstance(first, str) and isinstance(second, str):
        return first, second
    raise InvalidRequestError(
        "A pair must have text and text_pair, and both must be texts.", param="inputs"
    )


def _scores(job: Job, logits: np.ndarray) -> np.ndarray:
    function = job.parameters.function_to_apply
    if function is None:
        return activated(logits, job.call.model.info.problem_type)
    if function == "softmax":
        return softmax(logits)
    return activated(logits, PROBLEMS[function])
