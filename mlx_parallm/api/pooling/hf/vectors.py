"""Feature extraction and sentence similarity: vectors of texts, and how near they are."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np

from mlx_parallm.api.pooling.embeddings.answer import check_dimensions, finished
from mlx_parallm.api.pooling.embeddings.array_encoding import as_bytes
from mlx_parallm.api.pooling.hf.job import Done, Job
from mlx_parallm.api.pooling.hf.texts import reading, texts_of
from mlx_parallm.api.pooling.inputs.encode import Role, single_inputs
from mlx_parallm.api.pooling.inputs.prompts import named_prompt
from mlx_parallm.api.pooling.inputs.schema import MAX_INPUTS
from mlx_parallm.api.pooling.tei.answer import similarities
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_list, is_object


async def feature_extraction(job: Job) -> Done:
    """Return a list with a vector for each text, also for a text alone.

    Raises:
        ParallmError: see ``texts_of``, ``single_inputs`` and ``PoolingCall.written``.
    """
    vectors = await _vectors(job, texts_of(job.inputs))
    if job.parameters.encoding_format == "base64":
        return Done([base64.b64encode(as_bytes(vector)).decode() for vector in vectors])
    return Done(vectors.tolist())


async def sentence_similarity(job: Job) -> Done:
    """Return the cosine of each sentence with the source sentence.

    Raises:
        ParallmError: ``inputs`` is no object with these; see also ``feature_extraction``.
    """
    content = job.inputs if is_object(job.inputs) else {}
    source, sentences = content.get("source_sentence"), content.get("sentences")
    if not isinstance(source, str) or not is_list(sentences) or not 0 < len(sentences) < MAX_INPUTS:
        raise InvalidRequestError(
            "inputs must have source_sentence, a text, and sentences, a list of texts.",
            param="inputs",
        )
    vectors = await _vectors(job, texts_of([source, *sentences]))
    return Done(similarities(list(vectors)))


async def _vectors(job: Job, texts: Sequence[str]) -> np.ndarray:
    """Return vectors of the length that was asked for, float32 ``[texts, dimensions]``."""
    model, parameters = job.call.model, job.parameters
    check_dimensions(parameters.dimensions, model)
    role = Role(prompt=named_prompt(model.info, parameters.prompt_name))
    inputs = await single_inputs(texts, model, "embed", reading(parameters), role=role)
    vectors, _ = await job.call.written(inputs, lambda _, result: result)
    normalizes = model.info.normalizes if parameters.normalize is None else parameters.normalize
    return finished(vectors, parameters.dimensions, normalizes=normalizes)
