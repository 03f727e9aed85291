"""Pausing, resuming and emptying caches, in vLLM's and SGLang's forms."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Body, Query, Response
from fastapi.responses import PlainTextResponse

from mlx_parallm.api.control.pause.schema import (
    IsPaused,
    MessageAnswer,
    PausedAnswer,
    PausedGeneration,
    PauseGeneration,
    ResetAnswer,
    ResetRequest,
    StatusAnswer,
)
from mlx_parallm.api.http.declared import Access
from mlx_parallm.api.http.dependencies import EngineDep
from mlx_parallm.api.http.dialect import SGLANG
from mlx_parallm.api.http.openapi import SERVER
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.engine.control import PauseMode
from mlx_parallm.serving.interface import EngineClient
from mlx_parallm.types.errors import InvalidRequestError

routes = Routes(SERVER, access=Access.ADMIN)

MODES = {
    "abort": PauseMode.ABORT,
    "retract": PauseMode.KEEP,
    "in_place": PauseMode.KEEP,
}
MAX_FLUSH_WAIT_S = 600.0
POLL_S = 0.02


@routes.post("/pause")
async def pause(
    engine: EngineDep, mode: PauseMode = PauseMode.ABORT, clear_cache: bool = False
) -> PausedAnswer:
    """Stop generating (vLLM). The cache can stay, because its entries belong to their weights."""
    count = await engine.control.pause(mode, clear_cache=clear_cache)
    return PausedAnswer(status="paused", num_requests=count)


@routes.post("/resume")
async def resume(engine: EngineDep) -> StatusAnswer:
    """Resume generating (vLLM)."""
    await engine.control.resume()
    return StatusAnswer(status="resumed")


@routes.get("/is_paused")
async def is_paused(engine: EngineDep) -> IsPaused:
    """Return true if generation is paused (vLLM)."""
    return IsPaused(is_paused=engine.control.is_paused)


@routes.post("/pause_generation", dialect=SGLANG)
async def pause_generation(
    engine: EngineDep,
    body: Annotated[PauseGeneration | None, Body()] = None,
) -> PausedGeneration:
    """Stop generating (SGLang)."""
    mode = (body or PauseGeneration(mode="abort")).mode
    count = await engine.control.pause(MODES[mode])
    if mode == "retract":
        await engine.control.reset_prefix_cache(reset_running=True, reset_external=False)
    return PausedGeneration(message="Generation is paused.", num_paused_requests=count)


@routes.post("/continue_generation", dialect=SGLANG)
async def continue_generation(engine: EngineDep) -> MessageAnswer:
    """Resume generating (SGLang)."""
    await engine.control.resume()
    return MessageAnswer(message="Generation goes on.")


@routes.post("/reset_prefix_cache")
async def reset_prefix_cache(
    engine: EngineDep,
    reset_running_requests: bool = False,
    reset_external: bool = True,
    body: Annotated[ResetRequest | None, Body()] = None,
) -> ResetAnswer:
    """Empty the prefix cache (vLLM), and by default what host memory and a disk have of it."""
    running = reset_running_requests or (body is not None and body.reset_running_requests)
    await engine.control.reset_prefix_cache(reset_running=running, reset_external=reset_external)
    return ResetAnswer()


@routes.post("/reset_mm_cache", response_class=Response)
@routes.post("/reset_encoder_cache", response_class=Response)
async def reset_other_caches() -> Response:
    """Do nothing (vLLM): what is kept of images belongs to the weights that computed it."""
    return Response(status_code=200)


@routes.get("/flush_cache", response_class=PlainTextResponse)
@routes.post("/flush_cache", response_class=PlainTextResponse)
async def flush_cache(
    engine: EngineDep,
    wait_s: Annotated[float, Query(alias="timeout", ge=0, le=MAX_FLUSH_WAIT_S)] = 0.0,
) -> Response:
    """Empty the prefix cache once no request runs (SGLang); 400 if some run after the timeout."""
    if not await _is_quiet(engine, wait_s):
        raise InvalidRequestError("The cache was not flushed, because requests are running.")
    await engine.control.reset_prefix_cache()
    return PlainTextResponse("Cache flushed.\n")


async def _is_quiet(engine: EngineClient, wait_s: float) -> bool:
    """True if nothing is generated, now or at some time before the deadline."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + wait_s
    while (await engine.load()).num_requests and not engine.control.is_paused:
        if loop.time() >= until_s:
            return False
        await asyncio.sleep(POLL_S)
    return True
