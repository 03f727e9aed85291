"""From inputs to what is written of their results, in parts where the results are large."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.serving.interface import PoolingClient
from mlx_parallm.types.pooling import EncodeInput, EncoderInfo

T = TypeVar("T")
# PART_NUMBERS: most numbers of results that wait to be written; a vocabulary has some 50,000.
PART_NUMBERS = 16_000_000


async def encoded_in_parts(
    encoders: PoolingClient,
    model: PoolingModel,
    inputs: Sequence[EncodeInput],
    request_id: str,
    write: Callable[[EncodeInput, np.ndarray], T],
) -> tuple[list[T], list[bool]]:
    """Return what ``write`` makes of each input's result, and whether the result was cached.

    The results of one part are written before the next part is asked for.

    Raises:
        ParallmError: see ``PoolingClient.encode``.
    """
    written: list[T] = []
    hits: list[bool] = []
    for number, part in enumerate(_parts(inputs, model.info)):
        results = await encoders.encode(model.request(f"{request_id}-{number}", part))

        def write_all(part: Sequence[EncodeInput] = part, results: Sequence = results) -> list[T]:
            return [write(each, result) for each, result in zip(part, results, strict=True)]

        written += await asyncio.to_thread(write_all)
        hits += results.cache_hits
    return written, hits


def num_numbers(encoded: EncodeInput, info: EncoderInfo) -> int:
    """Return how many numbers an input's result has; see ``Task``."""
    if encoded.top_k:
        return len(encoded.places) * 2 * encoded.top_k
    if encoded.places:
        return len(encoded.places) * (len(encoded.candidates) or info.vocab_size)
    sizes = {
        "token_embed": len(encoded.token_ids) * info.dims,
        "token_classify": len(encoded.token_ids) * len(info.labels),
        "classify": len(info.labels),
        "sparse": info.vocab_size,
    }
    return sizes.get(encoded.task, info.dims)


def _parts(inputs: Sequence[EncodeInput], info: EncoderInfo) -> Iterator[Sequence[EncodeInput]]:
    begin = size = 0
    for place, each in enumerate(inputs):
        more = num_numbers(each, info)
        if place > begin and size + more > PART_NUMBERS:
            yield inputs[begin:place]
            begin, size = place, 0
        size += more
    if inputs[begin:]:
        yield inputs[begin:]
