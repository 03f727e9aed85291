"""Engines over scripted runners, on a thread or in a process of their own."""

from __future__ import annotations

import sys
from typing import Any

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.local_life import Build, LocalLife
from mlx_parallm.generation.kind import GENERATION
from mlx_parallm.peers.life import RemoteLife
from mlx_parallm.peers.origins import Spawned
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.serving.kinds import ignore_progress
from mlx_parallm.types.events import TokenEvent
from mlx_parallm.types.request import GenerateRequest, SamplingParams


def engine_of(
    build: Build, config: EngineConfig | None = None, *, owns_process: bool = False
) -> AsyncEngine:
    config = config or EngineConfig()
    life = LocalLife(config, ignore_progress, build=build)
    return AsyncEngine(config, life=life, owns_process=owns_process)


def make_request(request_id: str = "a", model: str = "m", **params: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=request_id, model=model, prompt_ids=(1, 2), params=SamplingParams(**params)
    )


def remote_life(
    script: str = "hello", config: EngineConfig | None = None, **options: Any
) -> RemoteLife:
    """Return a life in a process of its own, in which ``scripted_process`` runs ``script``."""
    command = [sys.executable, "-m", "tests.scripted_process", script]
    return RemoteLife(config or EngineConfig(), Spawned(command), ignore_progress, **options)


def remote_engine(
    script: str = "hello", config: EngineConfig | None = None, **options: Any
) -> AsyncEngine:
    """Return an engine with a ``remote_life``."""
    config = config or EngineConfig()
    return AsyncEngine(config, life=remote_life(script, config, **options))


async def text_of(engine: AsyncEngine, request: GenerateRequest) -> str:
    """Return what a request is answered."""
    handle = await GENERATION.client(engine).submit(request)
    return "".join([e.text async for e in handle.events if isinstance(e, TokenEvent)])
