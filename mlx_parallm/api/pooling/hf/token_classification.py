"""Token classification: labels of tokens, of words, or of groups of words."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlx_parallm.api.http.offload import maybe_in_thread
from mlx_parallm.api.pooling.activation import softmax
from mlx_parallm.api.pooling.encoded import encoded
from mlx_parallm.api.pooling.hf.entities import LabelledTokens, entities
from mlx_parallm.api.pooling.hf.job import Done, Job
from mlx_parallm.api.pooling.hf.texts import cut_to, cuts_left, text_inputs, texts_of
from mlx_parallm.api.pooling.inputs.encode import text_limit
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import EncodeInput, TokenSpan

#: What Hugging Face's servers do where nothing is asked for; transformers itself does "none".
STRATEGY = "simple"
OUTSIDE = ["O"]


async def token_classification(job: Job) -> Done:
    """A list of entities for a text; for several a list of these.

    Raises:
        ParallmError: see ``texts_of``, ``single_inputs`` and ``encoded``; texts are to be cut at
            their beginnings.
    """
    if cuts_left(job.parameters):
        raise InvalidRequestError(
            "Texts whose tokens are classified are cut at their ends.", param="truncation_direction"
        )
    texts, tokenizer = texts_of(job.inputs), job.model.tokenizer
    limit = text_limit(job.model, cut_to(job.parameters), "inputs")
    spans = await maybe_in_thread(lambda: tokenizer.spans(texts, limit=limit), sum(map(len, texts)))
    inputs = await text_inputs(
        job, [tuple(span.token_id for span in one) for one in spans], "token_classify"
    )
    logits, _ = await encoded(
        job.engine.encoders, job.model, inputs, job.request_id, lambda _, result: result
    )
    ignored = OUTSIDE if job.parameters.ignore_labels is None else job.parameters.ignore_labels
    strategy = job.parameters.aggregation_strategy or STRATEGY

    def write(own: list[TokenSpan], one: EncodeInput, rows: np.ndarray) -> list[dict[str, Any]]:
        kept = _kept(own, len(one.token_ids))
        tokens = LabelledTokens(
            [own[place] for place in kept], kept, softmax(rows[kept]), job.model.info.labels
        )
        found = entities(tokens, strategy, tokenizer.join)
        return [one for one in found if _label(one) not in ignored]

    answers = await maybe_in_thread(
        lambda: [write(*one) for one in zip(spans, inputs, logits, strict=True)],
        sum(map(len, texts)),
    )
    return Done(answers if isinstance(job.inputs, list) else answers[0])


def _kept(spans: list[TokenSpan], length: int) -> list[int]:
    """The places of tokens of the text in an input that may have been cut to a length."""
    own = [place for place, span in enumerate(spans) if not span.is_special]
    behind = len(spans) - 1 - own[-1] if own else 0
    return [place for place in own if place < length - behind]


def _label(entity: dict[str, Any]) -> str:
    return entity["entity"] if "entity" in entity else entity["entity_group"]
