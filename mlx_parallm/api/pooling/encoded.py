"""Calls of a model, which encode inputs in parts if their results are large."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np

from mlx_parallm.pooling.client import PoolingClient
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.types.pooling import PoolingInfo, PoolingInput, PoolingResults, PoolRequest, Task

T = TypeVar("T")

# PART_NUMBERS: most numbers in a part's results; a vocabulary has some 50,000.
PART_NUMBERS = 16_000_000
# FEW_NUMBERS, FEW_INPUTS: most numbers and inputs whose answer is written on the event loop: text
# with so many numbers takes half a millisecond, and most answers have one vector.
FEW_NUMBERS = 1024
FEW_INPUTS = 8
# WHOLE_TASKS: tasks with one short array for each input.
WHOLE_TASKS: frozenset[Task] = frozenset({"embed", "classify"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """Work for one model.

    Attributes:
        client: computes the results.
        model: reads the inputs.
        work_id: unique among the requests in flight.
    """

    client: PoolingClient
    model: PoolingModel
    work_id: str

    async def encode(self, inputs: Sequence[PoolingInput]) -> PoolingResults:
        """Return the results of inputs; see ``PoolingClient.encode``."""
        return await self._compute(self.model.request(self.work_id, inputs))

    async def written(
        self,
        inputs: Sequence[PoolingInput],
        write: Callable[[PoolingInput, np.ndarray], T],
        *,
        part: str = "",
    ) -> tuple[list[T], list[bool]]:
        """Return what ``write`` makes of each result, and for each True if it came from the cache.

        Args:
            inputs: encoded in parts if their results are large.
            write: runs as soon as a part is computed, on a thread unless ``are_few`` is true.
            part: distinguishes these inputs from others of the same call, in the ids of the work.
        """
        written: list[T] = []
        hits: list[bool] = []
        for number, some in enumerate(in_parts(inputs, self.model.info)):
            request = self.model.request(f"{self.work_id}-{part}{number}", some)
            results = await self._compute(request)
            work = partial(_written, some, results, write)
            written += work() if are_few(some, self.model.info) else await asyncio.to_thread(work)
            hits += results.cache_hits
        return written, hits

    def on_computed(self) -> None:
        """Note that some results have come."""

    async def _compute(self, request: PoolRequest) -> PoolingResults:
        results = await self.client.encode(request)
        self.on_computed()
        return results


def _written(
    inputs: Sequence[PoolingInput],
    results: Sequence[np.ndarray],
    write: Callable[[PoolingInput, np.ndarray], T],
) -> list[T]:
    return list(map(write, inputs, results))


def are_few(inputs: Sequence[PoolingInput], info: PoolingInfo) -> bool:
    """True if the results are so small that they may be written on the event loop.

    A thread would cost more than writing them: it takes the interpreter away from the loop, and
    gives it back. Results for each token are always written on a thread.
    """
    return (
        len(inputs) <= FEW_INPUTS
        and all(each.task in WHOLE_TASKS and not each.places for each in inputs)
        and sum(num_numbers(each, info) for each in inputs) <= FEW_NUMBERS
    )


def num_numbers(encoded: PoolingInput, info: PoolingInfo) -> int:
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


def in_parts(inputs: Sequence[PoolingInput], info: PoolingInfo) -> Iterator[Sequence[PoolingInput]]:
    """Yield inputs in parts whose results together are small enough."""
    begin = size = 0
    for place, each in enumerate(inputs):
        more = num_numbers(each, info)
        if place > begin and size + more > PART_NUMBERS:
            yield inputs[begin:place]
            begin, size = place, 0
        size += more
    if inputs[begin:]:
        yield inputs[begin:]
