"""Requests of pooling models whose inputs are shared out among engines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mlx_parallm.offline.pooling import DividedPooling
from mlx_parallm.types.errors import StepError
from mlx_parallm.types.pooling import PoolingInput, PoolingResults, PoolRequest


class EchoingModel:
    """Returns each input's first token, and notes the inputs of each request."""

    def __init__(self) -> None:
        self.requests: list[list[int]] = []
        self.num_cancelled = 0

    async def encode(self, request: PoolRequest) -> PoolingResults:
        """Return the tokens; fail where one is 13, and wait forever beside it."""
        tokens = [each.token_ids[0] for each in request.inputs]
        self.requests.append(tokens)
        if 13 in tokens:
            raise StepError("13")
        if 12 in tokens:
            try:
                await asyncio.Event().wait()
            finally:
                self.num_cancelled += 1
        return PoolingResults(
            [np.array([token]) for token in tokens], [bool(token % 2) for token in tokens]
        )


def divided(model: Any, tokens: Sequence[int], num_parts: int) -> PoolingResults:
    inputs = tuple(PoolingInput(token_ids=(token,), task="embed") for token in tokens)
    request = PoolRequest(request_id="r", model="m", inputs=inputs)
    return asyncio.run(DividedPooling(model, num_parts).encode(request))


@pytest.mark.parametrize("num_parts", [1, 2, 3, 8])
def test_results_are_in_the_order_of_the_inputs(num_parts: int) -> None:
    model, tokens = EchoingModel(), [5, 2, 9, 4, 7]
    results = divided(model, tokens, num_parts)
    assert [int(row[0]) for row in results] == tokens
    assert results.cache_hits == (True, False, True, False, True)
    assert len(model.requests) == min(num_parts, len(tokens))
    lengths = {len(part) for part in model.requests}
    assert max(lengths) - min(lengths) <= 1


def test_the_other_parts_end_with_one_that_fails() -> None:
    model = EchoingModel()
    with pytest.raises(StepError, match="13"):
        divided(model, [12, 13], 2)
    assert model.num_cancelled == 1
