"""Between the bodies of text-embeddings-inference and what an encoder takes and gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mlx_parallm.api.convert.activation import activated
from mlx_parallm.api.convert.embeddings import unit_vectors
from mlx_parallm.api.convert.encode_inputs import pair_inputs, single_inputs
from mlx_parallm.api.convert.input_prompts import named_prompt
from mlx_parallm.api.schemas.tei import EmbedOptions, PredictRequest
from mlx_parallm.encode import EncodeInput, EncoderInfo, Task
from mlx_parallm.engine.encoder_interface import EncoderModel
from mlx_parallm.errors import InvalidRequestError

PARAM = "inputs"


async def embed_inputs(
    inputs: Sequence[Any], options: EmbedOptions, model: EncoderModel, task: Task
) -> tuple[EncodeInput, ...]:
    """Texts with the prompt that is asked for, or token ids."""
    given = inputs
    if isinstance(inputs[0], str):
        prompt = named_prompt(model.info, options.prompt_name)
        given = [prompt + text for text in inputs]
    elif options.prompt_name is not None:
        raise InvalidRequestError("prompt_name is for texts.", param="prompt_name")
    return await single_inputs(
        given,
        model,
        task,
        truncate=-1 if options.truncate else None,
        from_left=options.truncation_direction == "left",
        param=PARAM,
    )


async def predict_inputs(body: PredictRequest, model: EncoderModel) -> tuple[EncodeInput, ...]:
    """The texts and pairs, in their order."""
    sequences, _ = body.inputs
    texts = [one[0] for one in sequences if len(one) == 1]
    pairs = [(one[0], one[1]) for one in sequences if len(one) == 2]
    truncate = -1 if body.truncate else None
    from_left = body.truncation_direction == "left"
    if pairs and from_left:
        raise InvalidRequestError(
            "Of a pair the end of the second text is cut: right.", param="truncation_direction"
        )
    found_texts = iter(
        await single_inputs(
            texts, model, "classify", truncate=truncate, from_left=from_left, param=PARAM
        )
        if texts
        else ()
    )
    found_pairs = iter(
        await pair_inputs(pairs, model, "classify", truncate=truncate, param=PARAM) if pairs else ()
    )
    return tuple(next(found_texts if len(one) == 1 else found_pairs) for one in sequences)


def predictions(logits: np.ndarray, info: EncoderInfo, *, raw_scores: bool) -> list[dict[str, Any]]:
    """The labels of a text, the likeliest first."""
    scores = logits if raw_scores else activated(logits, info.problem_type)
    order = np.argsort(-scores, kind="stable")
    return [{"score": float(scores[place]), "label": info.labels[place]} for place in order]


def sparse_values(weights: np.ndarray) -> list[dict[str, Any]]:
    """The words of the vocabulary that have a weight, in its order."""
    (places,) = weights.nonzero()
    values = weights[places].tolist()
    return [
        {"index": place, "value": value}
        for place, value in zip(places.tolist(), values, strict=True)
    ]


def similarities(vectors: Sequence[np.ndarray]) -> list[float]:
    """The cosine of the first vector with each of the others."""
    array = unit_vectors(np.stack(vectors).astype(np.float64))
    return (array[1:] @ array[0]).tolist()
