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

from mlx_parallm.api.generation import unless_disconnected
from mlx_parallm.encode import EncodeInput, EncodeRequest
from mlx_parallm.engine.interface import EncoderModel, EngineClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """What a route asks of an encoder.

    Attributes:
        model: reads the inputs.
        name: what the request calls it.
        inputs: at least one.
        request_id: the answer's.
    """

    model: EncoderModel
    name: str
    inputs: tuple[EncodeInput, ...]
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded(Encoding):
    """The same, with the results.

    Attributes:
        results: of each input; ``encode.Task`` has the shapes.
        created: when, in seconds of Unix time.
    """

    results: Sequence[np.ndarray]
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
    request: Request, engine: EngineClient, asked: Encoding, write: Callable[[Encoded], Response]
) -> Response:
    """Compute the results and write the answer, unless the client goes away.

    Args:
        request: of the client.
        engine: runs the model.
        asked: what is computed.
        write: makes the answer of the results, on a thread: thousands of vectors take long.

    Raises:
        ParallmError: what ``EncoderClient.encode`` raises.
    """

    async def respond() -> Response:
        results = await engine.encoders.encode(
            EncodeRequest(
                request_id=asked.request_id, model=asked.model.names[0], inputs=asked.inputs
            )
        )
        found = Encoded(
            model=asked.model,
            name=asked.name,
            inputs=asked.inputs,
            request_id=asked.request_id,
            results=results,
            created=int(time.time()),
        )
        return await asyncio.to_thread(write, found)

    return await unless_disconnected(request, respond())
