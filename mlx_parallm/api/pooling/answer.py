"""The way of a request through a pooling route: model, inputs, results, answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from fastapi import Depends, Request
from starlette.responses import Response

from mlx_parallm.api.http.dependencies import EngineDep
from mlx_parallm.api.pooling.encoded import ModelCall, num_numbers
from mlx_parallm.api.turns.generation import unless_disconnected
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.serving.interface import PoolingClient
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInput

# MAX_NUMBERS: most numbers of one answer, whose text has some 20 bytes for each.
MAX_NUMBERS = 2**24


@dataclass(frozen=True, slots=True)
class PoolingPrelude:
    """What is known of a request before its body is worked on.

    Attributes:
        request: of HTTP.
        client: as the caller may use them.
    """

    request: Request
    client: PoolingClient

    def call(
        self, model: PoolingModel, name: str | None, kind: str, own_id: str | None = None
    ) -> PoolingCall:
        """Go on with the model that was chosen.

        Args:
            model: reads the inputs.
            name: what the body calls it, if it does.
            kind: begins the answer's id.
            own_id: the body's part of that id; None: a new one.
        """
        new_id = self.request.state.answer_id
        return PoolingCall(
            request=self.request,
            client=self.client,
            model=model,
            name=name or model.names[0],
            work_id=f"{kind}-{new_id}",
            answer_id=f"{kind}-{own_id or new_id}",
        )


async def get_pooling_prelude(request: Request, engine: EngineDep) -> PoolingPrelude:
    """Return what is known of a request before its body is worked on."""
    return PoolingPrelude(request, engine.pooling)


PoolingDep = Annotated[PoolingPrelude, Depends(get_pooling_prelude)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingCall(ModelCall):
    """A request of HTTP whose model is known.

    Attributes:
        request: of HTTP.
        name: what the answer calls the model.
        answer_id: the answer's.
    """

    request: Request
    name: str
    answer_id: str

    async def respond(
        self,
        inputs: Sequence[PoolingInput],
        write: Callable[[Encoded], Response],
        *,
        param: str = "input",
        reduce: Callable[[np.ndarray], Any] | None = None,
    ) -> Response:
        """Compute the results and write the answer, unless the client goes away.

        Args:
            inputs: at least one, of one task.
            write: makes the answer, on a thread: thousands of vectors take long.
            param: the field of the body that the inputs came from.
            reduce: makes something small of each result, as soon as some of them are there.

        Raises:
            InvalidRequestError: the answer would be too large.
            ParallmError: see ``PoolingClient.encode``.
        """
        if reduce is None:
            _check_size(inputs, self.model, param)

        async def work() -> Response:
            results = await self._results(inputs, reduce)
            return await asyncio.to_thread(write, Encoded(self, inputs, results))

        return await unless_disconnected(self.request, work())

    async def _results(
        self, inputs: Sequence[PoolingInput], reduce: Callable[[np.ndarray], Any] | None
    ) -> Sequence[Any]:
        if reduce is None:
            return await self.encode(inputs)
        results, _ = await self.written(inputs, lambda _, result: reduce(result))
        return results


@dataclass(frozen=True, slots=True)
class Encoded:
    """Inputs with their results.

    Attributes:
        call: what they are of.
        inputs: at least one.
        results: of each input; ``Task`` has the shapes of those that were not reduced.
        created: when, in seconds of Unix time.
    """

    call: PoolingCall
    inputs: Sequence[PoolingInput]
    results: Sequence[Any]
    created: int = field(default_factory=lambda: int(time.time()))

    def answer(self, data: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return vLLM's answer with an entry for each input: OpenAI's list with two fields more."""
        return {
            "id": self.call.answer_id,
            "object": "list",
            "created": self.created,
            "model": self.call.name,
            "data": data,
            "usage": prompt_usage(num_tokens(self.inputs)),
        }


def num_tokens(inputs: Sequence[PoolingInput]) -> int:
    """Return how many tokens inputs have together."""
    return sum(len(each.token_ids) for each in inputs)


def prompt_usage(count: int) -> dict[str, int]:
    """Return OpenAI's usage of a request that generates nothing."""
    return {"prompt_tokens": count, "total_tokens": count}


def _check_size(inputs: Sequence[PoolingInput], model: PoolingModel, param: str) -> None:
    numbers = sum(num_numbers(each, model.info) for each in inputs)
    # That of vectors is bounded by the number of inputs.
    if inputs[0].task != "embed" and numbers > MAX_NUMBERS:
        raise InvalidRequestError(
            f"The answer would have {numbers} numbers; {MAX_NUMBERS} are the most: send less.",
            param=param,
        )
