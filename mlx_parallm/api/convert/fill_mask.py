"""What a masked LM says of each mask, as Hugging Face's fill-mask pipeline tells it."""

from __future__ import annotations

from typing import Any

import numpy as np

from mlx_parallm.encode import EncodeInput
from mlx_parallm.engine.encoder_interface import EncoderModel


def likeliest(logprobs: np.ndarray, count: int) -> list[int]:
    """The places of the largest numbers of a row, largest first; of equal ones the earlier."""
    count = min(count, len(logprobs))
    if count < len(logprobs):
        # A threshold, so that which of equal ones are kept does not depend on the partition.
        least = np.partition(logprobs, -count)[-count] if count else np.inf
        kept = np.flatnonzero(logprobs >= least)
    else:
        kept = np.arange(len(logprobs))
    order = np.argsort(-logprobs[kept], kind="stable")
    return kept[order][:count].tolist()


def fillings(
    one: EncodeInput, logprobs: np.ndarray, top_k: int, model: EncoderModel
) -> list[list[dict[str, Any]]]:
    """The likeliest tokens at each mask of an input, best first.

    Args:
        one: its places are its masks.
        logprobs: float32 ``[masks, candidates or vocabulary]``.
        top_k: how many of each mask.
        model: whose tokens they are.
    """
    return [
        [
            filling(one, place, int(one.candidates[at]) if one.candidates else at, row[at], model)
            for at in likeliest(row, top_k)
        ]
        for place, row in zip(one.places, logprobs, strict=True)
    ]


def filling(
    one: EncodeInput, place: int, token: int, logprob: float, model: EncoderModel
) -> dict[str, Any]:
    """A token at a mask, and the text with it.

    A text's special tokens are left out unless they show its other masks.
    """
    tokenizer = model.tokenizer
    ids = [*one.token_ids[:place], token, *one.token_ids[place + 1 :]]
    ids = [number for number in ids if number != tokenizer.pad_id]
    return {
        "score": float(np.exp(logprob)),
        "token": token,
        "token_str": tokenizer.decode([token]),
        "sequence": tokenizer.decode(ids, skip_special_tokens=len(one.places) == 1),
    }
