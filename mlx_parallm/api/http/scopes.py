"""Every request enters the engine through here, where it gets the cache scope of its client."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from mlx_parallm.api.http.view import View
from mlx_parallm.config import ServerConfig
from mlx_parallm.generation.model import RequestHandle
from mlx_parallm.serving.interface import EngineClient, PoolingClient
from mlx_parallm.types.cache_scope import EVERYBODY, CacheScope
from mlx_parallm.types.pooling import PoolingResults, PoolRequest
from mlx_parallm.types.request import GenerateRequest


def scope_of(client: str, config: ServerConfig) -> CacheScope:
    """Return the scope of what is computed for a client, as ``auth.client_of`` names it."""
    return CacheScope(client) if config.separates_keys else EVERYBODY


def scoped(engine: EngineClient, scope: CacheScope) -> EngineClient:
    """Return an engine whose requests find and keep what is computed in one scope."""
    return cast(EngineClient, _ScopedEngine(engine, scope))


class _ScopedEngine(View[EngineClient]):
    def __init__(self, engine: EngineClient, scope: CacheScope) -> None:
        super().__init__(engine)
        self._scope = scope

    async def submit(self, request: GenerateRequest) -> RequestHandle:
        return await self._viewed.submit(replace(request, scope=self._scope))

    @property
    def pooling(self) -> PoolingClient:
        return cast(PoolingClient, _ScopedPooling(self._viewed.pooling, self._scope))


class _ScopedPooling(View[PoolingClient]):
    def __init__(self, client: PoolingClient, scope: CacheScope) -> None:
        super().__init__(client)
        self._scope = scope

    async def encode(self, request: PoolRequest) -> PoolingResults:
        return await self._viewed.encode(replace(request, scope=self._scope))
