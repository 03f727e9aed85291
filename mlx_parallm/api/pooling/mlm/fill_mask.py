"""What a masked LM says of each mask, as Hugging Face's fill-mask pipeline tells it."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.pooling import PoolingInput

# LEAST_TOP_K: fewest tokens that are asked of the model for a mask, so that one kept result serves
# requests for different numbers of them.
LEAST_TOP_K = 16


def kept_top_k(top_k: int, model: PoolingModel) -> int:
    """Return how many tokens of a mask are asked of the model where so many are told."""
    return min(max(LEAST_TOP_K, 1 << (top_k - 1).bit_length()), model.info.vocab_size)


def fillings(
    text: PoolingInput, results: np.ndarray, top_k: int, model: PoolingModel
) -> list[list[dict[str, Any]]]:
    """Return the likeliest tokens at each mask of an input, best first.

    Args:
        text: its places are its masks.
        results: the result of ``mlm_top``, or log-probabilities of its candidates or of the whole
            vocabulary, float32 ``[masks, candidates or vocabulary]``.
        top_k: how many of each mask.
        model: whose tokens they are.
    """
    return [
        [
            filling(text, place, token, logprob, model)
            for token, logprob in _likeliest(text, row, top_k)
        ]
        for place, row in zip(text.places, results, strict=True)
    ]


def _likeliest(text: PoolingInput, row: np.ndarray, top_k: int) -> list[tuple[int, float]]:
    """Tokens with their log-probabilities, best first; of equal ones the earlier."""
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
