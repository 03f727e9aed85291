"""The engine as callers see it: every request enters here, and gets its client's cache scope."""

from __future__ import annotations

from typing import Any, cast

from mlx_parallm.api.http.auth import Caller
from mlx_parallm.api.http.request_record import current_record
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.serving.interface import RequestClient
from mlx_parallm.types.work import EVERYBODY, CacheScope, Request


def engine_for(caller: Caller, engine: RequestClient, config: ServerConfig) -> RequestClient:
    """Return the engine as a caller sees it.

    Its requests find and cache only results of their scope; those of the background wait behind
    all others.
    """
    scope = CacheScope(caller.client) if config.separates_keys else EVERYBODY
    return cast("RequestClient", _CallersEngine(engine, scope, caller))


class _CallersEngine:
    """Stands for an engine, through whose door requests of every kind enter as a caller's."""

    def __init__(self, engine: RequestClient, scope: CacheScope, caller: Caller) -> None:
        self._engine = engine
        self._scope = scope
        self._caller = caller

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def open_reader(self, request: Request) -> Any:
        caller = self._caller
        request = request.entering(self._scope, caller.rank, is_background=caller.is_background)
        model = request.adapter or request.model
        current_record().note_prompt(model, request.num_prompt_tokens)
        return await self._engine.open_reader(request)
