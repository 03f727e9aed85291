"""Runs the inputs of an encoder's route."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from mlx_parallm.api.pooling.encoded import encoded, num_numbers
from mlx_parallm.api.turns.generation import unless_disconnected
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.serving.interface import EngineClient
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import EncodeInput

# Of one answer, whose text has some 20 bytes for each.
MAX_NUMBERS = 2**24
Reduce = Callable[[np.ndarray], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """What a route asks of an encoder.

    Attributes:
        model: reads the inputs.
        name: what the request calls it.
        inputs: at least one, of one task.
        request_id: the answer's.
        param: the field of the body that they came from.
    """

    model: PoolingModel
    name: str
    inputs: tuple[EncodeInput, ...]
    request_id: str
    param: str = "input"


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded(Encoding):
    """The same, with the results.

    Attributes:
        results: of each input; ``encode.Task`` has the shapes of those that were not reduced.
        created: when, in seconds of Unix time.
    """

    results: Sequence[Any]
    created: int

    def usage(self) -> dict[str, int]:
        """The tokens of all inputs, as OpenAI counts them."""
        num_tokens = sum(len(one.token_ids) for one in self.inputs)
        return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}

    def answer(self, data: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """An entry for each input, as vLLM has it: OpenAI's list with two fields more."""
        return {
            "id": self.request_id,
            "object": "list",
            "created": self.created,
            "model": self.name,
            "data": data,
            "usage": self.usage(),
        }


async def encoded_response(
    request: Request,
    engine: EngineClient,
    asked: Encoding,
    write: Callable[[Encoded], Response],
    *,
    reduce: Reduce | None = None,
) -> Response:
    """Compute the results and write the answer, unless the client goes away.

    Args:
        request: of the client.
        engine: runs the model.
        asked: what is computed.
        write: makes the answer of the results, on a thread: thousands of vectors take long.
        reduce: makes something small of each result, as soon as some of them are there.

    Raises:
        InvalidRequestError: the answer would be too large.
        ParallmError: what ``EncoderClient.encode`` raises.
    """
    if reduce is None:
        _check_size(asked)

    async def respond() -> Response:
        results = await _results(engine, asked, reduce)
        found = Encoded(
            model=asked.model,
            name=asked.name,
            inputs=asked.inputs,
            request_id=asked.request_id,
            param=asked.param,
            results=results,
            created=int(time.time()),
        )
        return await asyncio.to_thread(write, found)

    return await unless_disconnected(request, respond())


async def _results(engine: EngineClient, asked: Encoding, reduce: Reduce | None) -> Sequence[Any]:
    if reduce is not None:
        found, _ = await encoded(
            engine.encoders,
            asked.model,
            asked.inputs,
            asked.request_id,
            lambda _, result: reduce(result),
        )
        return found
    return await engine.encoders.encode(asked.model.request(asked.request_id, asked.inputs))


def _check_size(asked: Encoding) -> None:
    numbers = sum(num_numbers(one, asked.model.info) for one in asked.inputs)
    # That of vectors is bounded by the number of inputs.
    if asked.inputs[0].task != "embed" and numbers > MAX_NUMBERS:
        raise InvalidRequestError(
            f"The answer would have {numbers} numbers; {MAX_NUMBERS} are the most: send less.",
            param=asked.param,
        )
