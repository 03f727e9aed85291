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
# Of the results that wait to be written: a row of the vocabulary is some 50,000.
PART_NUMBERS = 16_000_000


async def encoded(
    encoders: PoolingClient,
    model: PoolingModel,
    inputs: Sequence[EncodeInput],
    request_id: str,
    write: Callable[[EncodeInput, np.ndarray], T],
) -> tuple[list[T], list[bool]]:
    """What ``write`` makes of each input's result, and whether that was kept from a request before.

    The results of one part are written before the next part is asked for.

    Raises:
        ParallmError: see ``PoolingClient.encode``.
    """
    written: list[T] = []
    hits: list[bool] = []
    for number, part in enumerate(_parts(inputs, model.info)):
        results = await encoders.encode(model.request(f"{request_id}-{number}", part))

        def write_all(part: Sequence[EncodeInput] = part, results: Sequence = results) -> list[T]:
            return [write(one, result) for one, result in zip(part, results, strict=True)]

        written += await asyncio.to_thread(write_all)
        hits += results.cache_hits
    return written, hits


def num_numbers(one: EncodeInput, info: EncoderInfo) -> int:
    """How many an input's result has; see ``encode.Task``."""
    if one.top_k:
        return len(one.places) * 2 * one.top_k
    if one.places:
        return len(one.places) * (len(one.candidates) or info.vocab_size)
    sizes = {
        "token_embed": len(one.token_ids) * info.dims,
        "token_classify": len(one.token_ids) * len(info.labels),
        "classify": len(info.labels),
        "sparse": info.vocab_size,
    }
    return sizes.get(one.task, info.dims)


def _parts(inputs: Sequence[EncodeInput], info: EncoderInfo) -> Iterator[Sequence[EncodeInput]]:
    begin = size = 0
    for place, one in enumerate(inputs):
        more = num_numbers(one, info)
        if place > begin and size + more > PART_NUMBERS:
            yield inputs[begin:place]
            begin, size = place, 0
        size += more
    if inputs[begin:]:
        yield inputs[begin:]
