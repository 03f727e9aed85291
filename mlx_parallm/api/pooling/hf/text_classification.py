"""Text classification: the labels of a text, or of a pair of texts, best first."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlx_parallm.api.pooling.activation import activated, softmax
from mlx_parallm.api.pooling.encoded import encoded
from mlx_parallm.api.pooling.hf.job import Done, Job
from mlx_parallm.api.pooling.hf.texts import MAX_TEXTS, cut_to, text_inputs, texts_of
from mlx_parallm.api.pooling.inputs.encode import pair_inputs
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import EncodeInput, ProblemType

#: The problem whose scores the function makes, whatever the number of labels.
PROBLEMS: dict[str, ProblemType] = {
    "sigmoid": "multi_label_classification",
    "none": "regression",
}


async def text_classification(job: Job) -> Done:
    """A list of labels and scores for each text, also for a text alone.

    Raises:
        ParallmError: ``inputs`` is neither texts nor pairs; see ``single_inputs`` and ``encoded``.
    """
    inputs = await _inputs(job)
    labels = job.model.info.labels

    def write(one: EncodeInput, logits: np.ndarray) -> list[dict[str, Any]]:
        del one
        told = zip(labels, _scores(job, logits).tolist(), strict=True)
        rows = [{"label": label, "score": score} for label, score in told]
        return sorted(rows, key=lambda row: -row["score"])[: job.parameters.top_k]

    found, _ = await encoded(job.engine.encoders, job.model, inputs, job.request_id, write)
    return Done(found)


async def _inputs(job: Job) -> tuple[EncodeInput, ...]:
    given = [job.inputs] if isinstance(job.inputs, dict) else job.inputs
    is_list = isinstance(given, list) and 0 < len(given) <= MAX_TEXTS
    if not is_list or not all(isinstance(one, dict) for one in given):
        return await text_inputs(job, texts_of(job.inputs), "classify")
    pairs = [_pair(one) for one in given]
    return await pair_inputs(pairs, job.model, truncate=cut_to(job.parameters), param="inputs")


def _pair(one: dict[str, Any]) -> tuple[str, str]:
    first, second = one.get("text"), one.get("text_pair")
    if isinstance(first, str) and isinstance(second, str):
        return first, second
    raise InvalidRequestError("A pair has text and text_pair, both texts.", param="inputs")


def _scores(job: Job, logits: np.ndarray) -> np.ndarray:
    function = job.parameters.function_to_apply
    if function is None:
        return activated(logits, job.model.info.problem_type)
    if function == "softmax":
        return softmax(logits)
    return activated(logits, PROBLEMS[function])
