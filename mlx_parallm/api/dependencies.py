"""What routes take from the application's state."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from mlx_parallm.config import ServerConfig
from mlx_parallm.engine.interface import EngineClient


async def get_engine(request: Request) -> EngineClient:
    """The engine behind this application."""
    return request.app.state.engine


async def get_config(request: Request) -> ServerConfig:
    """The settings of this application."""
    return request.app.state.config


EngineDep = Annotated[EngineClient, Depends(get_engine)]
ConfigDep = Annotated[ServerConfig, Depends(get_config)]
