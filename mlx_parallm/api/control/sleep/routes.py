"""Sleep: giving memory back and having it again, in vLLM's and SGLang's words."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from mlx_parallm.api.control.pause.schema import MessageAnswer
from mlx_parallm.api.control.weights.schema import (
    IsSleeping,
    MemoryTags,
    SleepAnswer,
    WakeAnswer,
)
from mlx_parallm.api.http.declared import Access
from mlx_parallm.api.http.dependencies import EngineDep
from mlx_parallm.api.http.openapi import SERVER
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.api.sglang.dialect import SGLANG
from mlx_parallm.engine.control import PauseMode
from mlx_parallm.engine.live_weights import KV_CACHE, SLEEP_TAGS, WEIGHTS

routes = Routes(SERVER, access=Access.ADMIN)

# vLLM's tag for generating again, which is done once all else is there.
SCHEDULING = "scheduling"


@routes.post("/sleep")
async def sleep(
    engine: EngineDep,
    level: Annotated[int, Query(ge=0, le=2)] = 1,
    mode: PauseMode = PauseMode.ABORT,
) -> SleepAnswer:
    """vLLM's: pause, and give back memory of KV (level 1), and of weights (level 2)."""
    await engine.control.sleep(level, mode)
    return SleepAnswer(status="sleeping", level=level, mode=mode.value)


@routes.post("/wake_up")
async def wake_up(
    engine: EngineDep, tags: Annotated[list[str] | None, Query()] = None
) -> WakeAnswer:
    """vLLM's: have memory again; requests go on once all is there."""
    wanted = [tag for tag in tags if tag != SCHEDULING] if tags else None
    asleep = list(await engine.control.wake_up(wanted))
    return WakeAnswer(status="sleeping" if asleep else "awake", tags=asleep)


@routes.get("/is_sleeping")
async def is_sleeping(engine: EngineDep) -> IsSleeping:
    """vLLM's: whether memory is given back."""
    return IsSleeping(is_sleeping=engine.control.sleep_level > 0)


@routes.post("/release_memory_occupation", dialect=SGLANG)
async def release_memory(engine: EngineDep, body: MemoryTags | None = None) -> MessageAnswer:
    """SGLang's: give back memory; requests are kept, and computed anew afterwards."""
    tags = _known(body)
    if tags:
        await engine.control.sleep(2 if WEIGHTS in tags else 1, PauseMode.KEEP)
    return MessageAnswer(success=True, message="Memory is given back.", status="ok")


@routes.post("/resume_memory_occupation", dialect=SGLANG)
async def resume_memory(engine: EngineDep, body: MemoryTags | None = None) -> MessageAnswer:
    """SGLang's: have memory again; requests go on once all is there."""
    tags = _known(body)
    asleep = await engine.control.wake_up(tags) if tags else ()
    message = f"Still put away: {', '.join(asleep)}." if asleep else "Memory is there again."
    return MessageAnswer(success=True, message=message, status="ok")


def _known(body: MemoryTags | None) -> list[str]:
    """Return the tags of a body that are served; all of them if it has none."""
    if body is None or body.tags is None:
        return list(SLEEP_TAGS)
    return [tag for tag in body.tags if tag in (WEIGHTS, KV_CACHE)]
