"""From bodies of text-embeddings-inference to inputs, and from results to its answers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from mlx_parallm import __version__
from mlx_parallm.api.pooling.inputs.encode import pair_inputs, single_inputs
from mlx_parallm.api.pooling.inputs.schema import MAX_INPUTS
from mlx_parallm.api.pooling.tei.schema import PredictRequest
from mlx_parallm.api.pooling.vectors.arrays import activated, ranked_labels
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInfo, PoolingInput, TokenSpan

PARAM = "inputs"
# TEI's names of poolings, where they differ.
_POOLINGS = {"last": "last_token"}


async def predict_inputs(body: PredictRequest, model: PoolingModel) -> tuple[PoolingInput, ...]:
    """Return texts and pairs as inputs to classify, in their order."""
    sequences, _ = body.inputs
    reading = body.reading(PARAM)
    texts = [each[0] for each in sequences if len(each) == 1]
    pairs = [(each[0], each[1]) for each in sequences if len(each) == 2]
    if pairs and reading.from_left:
        raise InvalidRequestError(
            "truncation_direction must be right: the second text of a pair is cut at its end.",
            param="truncation_direction",
        )
    of_texts = await single_inputs(texts, model, "classify", reading) if texts else ()
    of_pairs = await pair_inputs(pairs, model, reading) if pairs else ()
    next_text, next_pair = iter(of_texts), iter(of_pairs)
    return tuple(next(next_text if len(each) == 1 else next_pair) for each in sequences)


def predictions(logits: np.ndarray, info: PoolingInfo, *, raw_scores: bool) -> list[dict[str, Any]]:
    """Return the labels of a text, the likeliest first."""
    scores = logits if raw_scores else activated(logits, info.problem_type)
    return ranked_labels(scores, info.labels)


def sparse_values(weights: np.ndarray) -> list[dict[str, Any]]:
    """Return the tokens of the vocabulary that have a weight, by id."""
    (places,) = weights.nonzero()
    pairs = zip(places.tolist(), weights[places].tolist(), strict=True)
    return [{"index": place, "value": value} for place, value in pairs]


def text_tokens(text: str, spans: Sequence[TokenSpan]) -> list[dict[str, Any]]:
    """Return the tokens of a text with their offsets in its UTF-8 bytes; null for special ones."""
    places = {place for span in spans for place in (span.start, span.end)}
    at_byte = _byte_offsets(text, sorted(places))
    return [
        {
            "id": span.token_id,
            "text": span.token if span.is_special else text[span.start : span.end],
            "special": span.is_special,
            "start": None if span.is_special else at_byte[span.start],
            "stop": None if span.is_special else at_byte[span.end],
        }
        for span in spans
    ]


def _byte_offsets(text: str, places: Sequence[int]) -> dict[int, int]:
    """Return the byte offsets of characters at ascending places."""
    offsets: dict[int, int] = {}
    begin = num_bytes = 0
    for place in places:
        num_bytes += len(text[begin:place].encode())
        offsets[place], begin = num_bytes, place
    return offsets


def model_facts(model: PoolingModel) -> dict[str, Any]:
    """Return TEI's facts about a model and its limits here."""
    return {
        "model_id": model.root,
        "model_sha": None,
        "model_dtype": model.info.dtype,
        "served_model_name": model.names[0],
        "model_type": _model_type(model.info),
        "max_concurrent_requests": model.max_waiting,
        "max_input_length": model.info.max_model_len,
        "max_batch_tokens": model.max_batch_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": MAX_INPUTS,
        "auto_truncate": True,
        # The tokenizers library uses all processors.
        "tokenization_workers": os.cpu_count() or 1,
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }


def _model_type(info: PoolingInfo) -> dict[str, Any]:
    """Return TEI's ``classifier``, ``reranker`` (with one label) or ``embedding``."""
    purpose = info.tasks[0]
    if purpose in ("classify", "token_classify"):
        kind = "reranker" if purpose == "classify" and len(info.labels) == 1 else "classifier"
        by_number = {str(number): label for number, label in enumerate(info.labels)}
        by_label = {label: number for number, label in enumerate(info.labels)}
        return {kind: {"id2label": by_number, "label2id": by_label}}
    poolings = [_POOLINGS.get(name, name) for name in info.poolings]
    pooling = {"mlm": "splade", "token_embed": "none"}.get(purpose, "+".join(poolings))
    return {"embedding": {"pooling": pooling}}
