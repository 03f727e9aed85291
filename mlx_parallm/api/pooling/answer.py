"""The path of a request through a pooling route: model, inputs, results, answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from fastapi import Depends, Request
from starlette.responses import JSONResponse, Response

from mlx_parallm.api.http.dependencies import get_requests
from mlx_parallm.api.http.keep_alive import KeepAliveTime
from mlx_parallm.api.pooling.encoded import ModelCall, are_few, num_numbers
from mlx_parallm.api.turns.generation import unless_disconnected
from mlx_parallm.engine.models import name_for
from mlx_parallm.pooling.client import PoolingClient
from mlx_parallm.pooling.kind import POOLING
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.serving.interface import RequestClient
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.pooling import PoolingInput, Task

# MAX_NUMBERS: most numbers of one answer, whose text has some 20 bytes for each.
MAX_NUMBERS = 2**24


@dataclass(frozen=True, slots=True)
class PoolingPrelude:
    """A request before its body is worked on.

    Attributes:
        request: the HTTP request.
        engine: serves the models, as the caller may use them.
        client: the pooling models among them.
    """

    request: Request
    engine: RequestClient
    client: PoolingClient

    def open(
        self, kind: str, name: str | None, *tasks: Task, own_id: str | None = None
    ) -> PoolingCall:
        """Return the call of the model with this name; see ``call`` and ``PoolingClient.get``."""
        return self.call(self.client.get(name, *tasks), name, kind, own_id)

    def call(
        self, model: PoolingModel, name: str | None, kind: str, own_id: str | None = None
    ) -> PoolingCall:
        """Return the call of a model that the route chose.

        Args:
            model: reads the inputs.
            name: the model's name in the body; None if the body names none.
            kind: prefix of the answer's id.
            own_id: the rest of that id, if the body chooses it; None: a new one.
        """
        new_id = self.request.state.answer_id
        return PoolingCall(
            request=self.request,
            engine=self.engine,
            client=self.client,
            model=model,
            stay=KeepAliveTime.of(self.request),
            name=name_for(model, name),
            work_id=f"{kind}-{new_id}",
            answer_id=f"{kind}-{own_id or new_id}",
        )


async def get_pooling_prelude(request: Request) -> PoolingPrelude:
    """Return a request before its body is worked on."""
    engine = await get_requests(request)
    return PoolingPrelude(request, engine, POOLING.client(engine))


PoolingDep = Annotated[PoolingPrelude, Depends(get_pooling_prelude)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingCall(ModelCall):
    """An HTTP request whose model is known.

    Attributes:
        request: the HTTP request.
        engine: serves the models.
        stay: the time that the model is to stay in memory.
        name: the model's name in the answer.
        answer_id: the answer's id.
    """

    request: Request
    engine: RequestClient
    stay: KeepAliveTime
    name: str
    answer_id: str

    def on_computed(self) -> None:
        """Let the model stay in memory."""
        self.stay.set(self.engine, self.model.names[0])

    async def respond(
        self,
        inputs: Sequence[PoolingInput],
        answer: Callable[[Encoded], Any],
        *,
        param: str = "input",
        reduce: Callable[[np.ndarray], Any] | None = None,
    ) -> Response:
        """Compute the results and write the answer, unless the client goes away.

        Args:
            inputs: at least one, all of one task.
            answer: makes the JSON of the answer, or the response itself. It runs on a thread unless
                ``are_few`` is true, because thousands of vectors take long to write.
            param: the field of the body that the inputs came from.
            reduce: makes something small of each result, as soon as some of them are computed.

        Raises:
            InvalidRequestError: the answer would be too large.
            ParallmError: see ``PoolingClient.encode``.
        """
        if reduce is None:
            _check_size(inputs, self.model, param)

        reduced = reduce or np.asarray

        async def work() -> Response:
            results, _ = await self.written(inputs, lambda _, result: reduced(result))
            encoded = Encoded(self, inputs, results)
            if are_few(inputs, self.model.info):
                return write(encoded)
            return await asyncio.to_thread(write, encoded)

        def write(encoded: Encoded) -> Response:
            content = answer(encoded)
            return content if isinstance(content, Response) else JSONResponse(content)

        return await unless_disconnected(self.request, work())


@dataclass(frozen=True, slots=True)
class Encoded:
    """Inputs with their results.

    Attributes:
        call: the request and its model.
        inputs: at least one.
        results: one for each input; ``Task`` has the shapes of those that were not reduced.
        created: Unix time in seconds.
    """

    call: PoolingCall
    inputs: Sequence[PoolingInput]
    results: Sequence[Any]
    created: int = field(default_factory=lambda: int(time.time()))

    def answer(self, data: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return vLLM's answer with an entry for each input: OpenAI's list with two more fields."""
        return {
            "id": self.call.answer_id,
            "object": "list",
            "created": self.created,
            "model": self.call.name,
            "data": data,
            "usage": prompt_usage(num_tokens(self.inputs)),
        }


def num_tokens(inputs: Sequence[PoolingInput]) -> int:
    """Return the number of tokens of all inputs together."""
    return sum(len(each.token_ids) for each in inputs)


def prompt_usage(count: int) -> dict[str, int]:
    """Return OpenAI's usage of a request that generates nothing."""
    return {"prompt_tokens": count, "total_tokens": count}


def _check_size(inputs: Sequence[PoolingInput], model: PoolingModel, param: str) -> None:
    numbers = sum(num_numbers(each, model.info) for each in inputs)
    # The number of inputs bounds how many numbers vectors have.
    if inputs[0].task != "embed" and numbers > MAX_NUMBERS:
        raise InvalidRequestError(
            f"The answer would have {numbers} numbers, and at most {MAX_NUMBERS} are allowed. "
            "Send fewer inputs.",
            param=param,
        )
