"""Requests that the server makes of its own application, for work in the background.

They are told by an entry of the ASGI scope, which no client can set.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

from starlette.requests import HTTPConnection

from mlx_parallm.api.http.auth import client_of
from mlx_parallm.api.http.view import View
from mlx_parallm.generation.model import RequestHandle
from mlx_parallm.serving.interface import EngineClient
from mlx_parallm.types.request import GenerateRequest

INTERNAL_CALLER = "mlx_parallm.internal_caller"
# Above every 64-bit number, and so behind every request of a client, whatever its priority.
BACKGROUND_PRIORITY = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who makes a request.

    Attributes:
        client: whose work it is, as ``auth.client_of`` says it.
        engine: what its routes see of the engine.
        max_waiting: sequences that one of its requests may put into the queue; None: not known.
    """

    client: str
    engine: EngineClient
    max_waiting: int | None


def caller_of(connection: HTTPConnection) -> Caller:
    """Return who makes a request: the server for somebody, or a client."""
    internal: Caller | None = connection.scope.get(INTERNAL_CALLER)
    if internal is not None:
        return internal
    state = connection.app.state
    client = client_of(connection.headers, state.config)
    return Caller(client=client, engine=state.engine, max_waiting=state.max_waiting)


def in_background(engine: EngineClient, client: str) -> EngineClient:
    """Return an engine whose requests are a client's and run behind everybody else's."""
    return cast(EngineClient, _BackgroundEngine(engine, client))


class _BackgroundEngine(View[EngineClient]):
    def __init__(self, engine: EngineClient, client: str) -> None:
        super().__init__(engine)
        self._client = client

    async def check_room(self, model: str, client: str, n: int) -> None:
        del client
        await self._viewed.check_room(model, self._client, n)

    async def submit(self, request: GenerateRequest) -> RequestHandle:
        priority = BACKGROUND_PRIORITY + request.priority
        return await self._viewed.submit(replace(request, priority=priority, client=self._client))
