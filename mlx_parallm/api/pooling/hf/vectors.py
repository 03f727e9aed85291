"""Feature extraction and sentence similarity: vectors of texts, and their cosines."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from mlx_parallm.api.pooling.embeddings.answer import check_dimensions, finished, similarities
from mlx_parallm.api.pooling.embeddings.array_encoding import as_bytes
from mlx_parallm.api.pooling.hf.job import Job
from mlx_parallm.api.pooling.inputs.request import prompted_inputs
from mlx_parallm.api.pooling.inputs.schema import MAX_INPUTS
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_list, is_object


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


async def _vectors(job: Job, texts: Sequence[str]) -> Sequence[np.ndarray]:
    """Return vectors as the parameters say, float32 ``[dimensions]`` each."""
    model, parameters = job.call.model, job.parameters
    check_dimensions(parameters.dimensions, model)
    inputs = await prompted_inputs(texts, model, "embed", job.reading, parameters.prompt_name)
    vectors, _ = await job.call.written(inputs, lambda _, result: result)
    options = (parameters.dimensions, parameters.normalize)
    return finished(vectors, "embed", model.info, *options)
