"""The engine as callers see it: every request enters here, and gets its client's cache scope."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from mlx_parallm.api.http.internal import Caller
from mlx_parallm.api.http.request_record import current_record
from mlx_parallm.config import ServerConfig
from mlx_parallm.generation.model import RequestHandle
from mlx_parallm.serving.interface import PoolingClient, RequestClient
from mlx_parallm.types.pooling import PoolingResults, PoolRequest
from mlx_parallm.types.request import EVERYBODY, CacheScope, GenerateRequest

# BACKGROUND_PRIORITY: above every 64-bit number, and so behind every request of a client.
BACKGROUND_PRIORITY = 2**64


def engine_for(caller: Caller, engine: RequestClient, config: ServerConfig) -> RequestClient:
    """Return the engine as a caller sees it.

    Its requests find and cache only results of their scope; those of the background wait behind
    all others.
    """
    scope = CacheScope(caller.client) if config.separates_keys else EVERYBODY
    return cast(RequestClient, _CallersEngine(engine, scope, caller))


class _View:
    """Stands for an object, whose attributes it has unless a subclass defines them."""

    def __init__(self, viewed: Any, scope: CacheScope, caller: Caller) -> None:
        self._viewed = viewed
        self._scope = scope
        self._caller = caller

    def __getattr__(self, name: str) -> Any:
        return getattr(self._viewed, name)


class _CallersEngine(_View):
    async def submit(self, request: GenerateRequest) -> RequestHandle:
        last = BACKGROUND_PRIORITY if self._caller.is_background else 0
        request = replace(
            request,
            scope=self._scope,
            priority=last + request.priority,
            rank=self._caller.rank if request.rank is None else request.rank,
        )
        current_record().note_prompt(request.adapter or request.model, len(request.prompt_ids))
        return await self._viewed.submit(request)

    @property
    def pooling(self) -> PoolingClient:
        return cast(PoolingClient, _CallersPooling(self._viewed.pooling, self._scope, self._caller))


class _CallersPooling(_View):
    async def encode(self, request: PoolRequest) -> PoolingResults:
        request = replace(request, scope=self._scope, rank=self._caller.rank)
        current_record().note_prompt(request.adapter or request.model, request.work().num_tokens)
        return await self._viewed.encode(request)
