"""What routes take from the application's state."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from mlx_parallm.api.http.auth import client_of
from mlx_parallm.api.http.internal import internal_caller
from mlx_parallm.api.http.scopes import scope_of, scoped
from mlx_parallm.config import ServerConfig
from mlx_parallm.serving.interface import EngineClient


async def get_config(request: Request) -> ServerConfig:
    """The settings of this application."""
    return request.app.state.config


async def get_max_waiting(request: Request) -> int | None:
    """How many sequences the engine's queue holds for this caller, if that is known."""
    caller = internal_caller(request)
    return caller.max_waiting if caller is not None else request.app.state.max_waiting


async def get_client(request: Request) -> str:
    """Whose request it is: a digest of its key, or the owner of what is done in the background."""
    caller = internal_caller(request)
    if caller is not None:
        return caller.client
    return client_of(request.headers, request.app.state.config)


async def get_engine(request: Request) -> EngineClient:
    """The engine behind this application, as the caller may use it."""
    caller = internal_caller(request)
    engine = caller.engine if caller is not None else request.app.state.engine
    return scoped(engine, scope_of(await get_client(request), request.app.state.config))


EngineDep = Annotated[EngineClient, Depends(get_engine)]
ConfigDep = Annotated[ServerConfig, Depends(get_config)]
ClientDep = Annotated[str, Depends(get_client)]
MaxWaitingDep = Annotated[int | None, Depends(get_max_waiting)]
