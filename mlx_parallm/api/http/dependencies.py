"""Dependencies of routes on the application's state and the caller."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Request

from mlx_parallm.api.http.auth import caller_of
from mlx_parallm.api.http.scopes import engine_for
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.serving.interface import EngineClient, RequestClient
from mlx_parallm.types.errors import ShuttingDownError


async def get_config(request: Request) -> ServerConfig:
    """Return the settings of this application."""
    return request.app.state.config


async def get_max_waiting(request: Request) -> int | None:
    """Return the most sequences of this caller in the engine's queue; None if not known."""
    return caller_of(request).max_waiting


async def get_client(request: Request) -> str:
    """Return the client: a digest of its key, also for work in the background."""
    return caller_of(request).client


async def get_requests(request: Request) -> RequestClient:
    """Return the engine behind this application, as the caller's requests see it."""
    state = request.app.state
    return engine_for(caller_of(request), state.engine, state.config)


async def get_engine(request: Request) -> EngineClient:
    """Return the engine behind this application, as the caller may use it.

    Only applications with all routes have it; see ``RouteFacts.in_any_process``.
    """
    return cast("EngineClient", await get_requests(request))


async def get_open_engine(request: Request) -> EngineClient:
    """Return the engine, for routes by which balancers learn whether to send requests.

    Raises:
        ShuttingDownError: no more are to be sent, though some may still be admitted.
        EngineDeadError: none is admitted.
    """
    engine = await get_engine(request)
    engine.check_open()
    if request.app.state.is_leaving:
        raise ShuttingDownError("The server is about to shut down.")
    return engine


# These take the request alone, so that routes may be called directly; see ``direct_call``.
RequestsDep = Annotated[RequestClient, Depends(get_requests)]
EngineDep = Annotated[EngineClient, Depends(get_engine)]
OpenEngineDep = Annotated[EngineClient, Depends(get_open_engine)]
ConfigDep = Annotated[ServerConfig, Depends(get_config)]
ClientDep = Annotated[str, Depends(get_client)]
MaxWaitingDep = Annotated[int | None, Depends(get_max_waiting)]
