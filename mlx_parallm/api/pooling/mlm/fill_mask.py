"""The likeliest tokens at each mask, in the form of Hugging Face's fill-mask pipeline."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.pooling import PoolingInput


def fillings(
    text: PoolingInput, results: np.ndarray, top_k: int, model: PoolingModel
) -> list[list[dict[str, Any]]]:
    """Return the likeliest tokens at each mask of an input, best first.

    Args:
        text: an input whose places are its masks.
        results: the result of ``mlm_top``, or log-probabilities of its candidates or of the whole
            vocabulary, float32 ``[masks, candidates or vocabulary]``.
        top_k: how many tokens of each mask.
        model: has the vocabulary.
    """
    return [
        [
            filling(text, place, token, logprob, model)
            for token, logprob in _likeliest(text, row, top_k)
        ]
        for place, row in zip(text.places, results, strict=True)
    ]


def _likeliest(text: PoolingInput, row: np.ndarray, top_k: int) -> list[tuple[int, float]]:
    """Return tokens with their log-probabilities, best first; of equals the earlier one first."""
    if text.task == "mlm_top":
        ids, logprobs = row[:, :top_k].tolist()
        return [(int(token), logprob) for token, logprob in zip(ids, logprobs, strict=True)]
    order = np.argsort(-row, kind="stable")[:top_k].tolist()
    return [(text.candidates[at] if text.candidates else at, float(row[at])) for at in order]


def filling(
    text: PoolingInput, place: int, token: int, logprob: float, model: PoolingModel
) -> dict[str, Any]:
    """Return a token at a mask, and the text with it.

    A text's special tokens are left out unless they show its other masks.
    """
    tokenizer = model.tokenizer
    ids = [*text.token_ids[:place], token, *text.token_ids[place + 1 :]]
    ids = [number for number in ids if number != tokenizer.pad_id]
    return {
        "score": float(np.exp(logprob)),
        "token": token,
        "token_str": tokenizer.decode([token]),
        "sequence": tokenizer.decode(ids, skip_special_tokens=len(text.places) == 1),
    }
