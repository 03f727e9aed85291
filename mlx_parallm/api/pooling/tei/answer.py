"""Between the bodies of text-embeddings-inference and what an encoder takes and gives."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from mlx_parallm import __version__
from mlx_parallm.api.pooling.activation import activated, ranked_labels
from mlx_parallm.api.pooling.embeddings.answer import unit_vectors
from mlx_parallm.api.pooling.inputs.encode import Role, pair_inputs, single_inputs
from mlx_parallm.api.pooling.inputs.prompts import named_prompt
from mlx_parallm.api.pooling.inputs.schema import MAX_INPUTS
from mlx_parallm.api.pooling.tei.schema import EmbedOptions, PredictRequest
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInfo, PoolingInput, Task, TokenSpan

PARAM = "inputs"
# Where TEI's name is another.
_POOLINGS = {"last": "last_token"}


async def embed_inputs(
    inputs: Sequence[Any], options: EmbedOptions, model: PoolingModel, task: Task
) -> tuple[PoolingInput, ...]:
    """Return inputs: texts with the prompt that is asked for, or token ids."""
    if options.prompt_name is not None and not isinstance(inputs[0], str):
        raise InvalidRequestError("prompt_name is for texts.", param="prompt_name")
    role = Role(prompt=named_prompt(model.info, options.prompt_name))
    return await single_inputs(inputs, model, task, options.reading(PARAM), role=role)


async def predict_inputs(body: PredictRequest, model: PoolingModel) -> tuple[PoolingInput, ...]:
    """Return texts and pairs as inputs to classify, in their order."""
    sequences, _ = body.inputs
    reading = body.reading(PARAM)
    texts = [each[0] for each in sequences if len(each) == 1]
    pairs = [(each[0], each[1]) for each in sequences if len(each) == 2]
    if pairs and reading.from_left:
        raise InvalidRequestError(
            "Of a pair the end of the second text is cut: right.", param="truncation_direction"
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
    """Return the words of the vocabulary that have a weight, in its order."""
    (places,) = weights.nonzero()
    values = weights[places].tolist()
    return [
        {"index": place, "value": value}
        for place, value in zip(places.tolist(), values, strict=True)
    ]


def text_tokens(text: str, spans: Sequence[TokenSpan]) -> list[dict[str, Any]]:
    """Return the tokens of a text and their places in its UTF-8 bytes; special ones have none."""
    places = {place for span in spans for place in (span.start, span.end)}
    at_byte = _byte_offsets(text, sorted(places))
    return [
        {"id": span.token_id, "text": span.token, "special": True, "start": None, "stop": None}
        if span.is_special
        else {
            "id": span.token_id,
            "text": text[span.start : span.end],
            "special": False,
            "start": at_byte[span.start],
            "stop": at_byte[span.end],
        }
        for span in spans
    ]


def _byte_offsets(text: str, places: Sequence[int]) -> dict[int, int]:
    """Return where characters at ascending places are among the bytes."""
    offsets: dict[int, int] = {}
    begin = num_bytes = 0
    for place in places:
        num_bytes += len(text[begin:place].encode())
        offsets[place], begin = num_bytes, place
    return offsets


def model_facts(model: PoolingModel) -> dict[str, Any]:
    """Return what TEI tells of a model, and of what is done with it here."""
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
        # That of the tokenizers library, which uses all.
        "tokenization_workers": os.cpu_count() or 1,
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }


def _model_type(info: PoolingInfo) -> dict[str, Any]:
    """TEI's ``classifier``, ``reranker`` (of one label) or ``embedding``."""
    purpose = info.tasks[0]
    if purpose in ("classify", "token_classify"):
        kind = "reranker" if purpose == "classify" and len(info.labels) == 1 else "classifier"
        by_number = {str(number): label for number, label in enumerate(info.labels)}
        by_label = {label: number for number, label in enumerate(info.labels)}
        return {kind: {"id2label": by_number, "label2id": by_label}}
    poolings = [_POOLINGS.get(name, name) for name in info.poolings]
    pooling = {"mlm": "splade", "token_embed": "none"}.get(purpose, "+".join(poolings))
    return {"embedding": {"pooling": pooling}}


def similarities(vectors: Sequence[np.ndarray]) -> list[float]:
    """Return the cosine of the first vector with each of the others."""
    array = unit_vectors(np.stack(vectors).astype(np.float64))
    return (array[1:] @ array[0]).tolist()
