"""Token classification: labels of tokens, of words, or of groups of words."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlx_parallm.api.http.offload import maybe_in_thread
from mlx_parallm.api.pooling.hf.entities import LabelledTokens, entities
from mlx_parallm.api.pooling.hf.job import Job
from mlx_parallm.api.pooling.inputs.encode import single_inputs, text_limit
from mlx_parallm.api.pooling.vectors.arrays import softmax
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInput, TokenSpan

#: STRATEGY: the default of Hugging Face's servers; that of transformers itself is "none".
STRATEGY = "simple"
OUTSIDE = ["O"]


async def token_classification(job: Job) -> list[Any]:
    """Return a list of entities for a text; for several a list of these.

    Raises:
        ParallmError: the request cuts texts at their beginnings; see also ``Job.texts``,
            ``single_inputs`` and ``PoolingCall.written``.
    """
    how, model = job.reading, job.call.model
    if how.from_left:
        raise InvalidRequestError(
            "truncation_direction must be right for token classification.",
            param="truncation_direction",
        )
    texts, tokenizer = job.texts(), model.tokenizer
    length, limit = sum(map(len, texts)), text_limit(model, how)
    spans = await maybe_in_thread(lambda: tokenizer.spans(texts, limit=limit), length)
    ids = [tuple(span.token_id for span in own) for own in spans]
    inputs = await single_inputs(ids, model, "token_classify", how)
    logits, _ = await job.call.written(inputs, lambda _, result: result)
    ignored = OUTSIDE if job.parameters.ignore_labels is None else job.parameters.ignore_labels
    strategy = job.parameters.aggregation_strategy or STRATEGY

    def write(own: list[TokenSpan], text: PoolingInput, rows: np.ndarray) -> list[dict[str, Any]]:
        kept = _kept(own, len(text.token_ids))
        tokens = LabelledTokens(
            [own[place] for place in kept], kept, softmax(rows[kept]), model.info.labels
        )
        all_entities = entities(tokens, strategy, tokenizer.join)
        return [entity for entity in all_entities if _label(entity) not in ignored]

    answers = await maybe_in_thread(lambda: list(map(write, spans, inputs, logits)), length)
    return answers if isinstance(job.inputs, list) else answers[0]


def _kept(spans: list[TokenSpan], length: int) -> list[int]:
    """Return the places of tokens of the text in an input that may have been cut to a length."""
    own = [place for place, span in enumerate(spans) if not span.is_special]
    behind = len(spans) - 1 - own[-1] if own else 0
    return [place for place in own if place < length - behind]


def _label(entity: dict[str, Any]) -> str:
    return entity["entity"] if "entity" in entity else entity["entity_group"]
