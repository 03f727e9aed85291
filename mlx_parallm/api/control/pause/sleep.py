"""Sleep: releasing memory and allocating it again, in vLLM's and SGLang's forms."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Query
from pydantic import BaseModel, Field

from mlx_parallm.api.control.pause.schema import MessageAnswer
from mlx_parallm.api.http.declared import Access
from mlx_parallm.api.http.dependencies import EngineDep
from mlx_parallm.api.http.dialect import SGLANG
from mlx_parallm.api.http.forms import OpenForm
from mlx_parallm.api.http.openapi import SERVER
from mlx_parallm.api.http.routing import Routes
from mlx_parallm.engine.control import PauseMode
from mlx_parallm.engine.live_weights import KV_CACHE, SLEEP_TAGS, WEIGHTS

routes = Routes(SERVER, access=Access.ADMIN)
# SCHEDULING: vLLM's tag for resuming requests, which happens once all memory is allocated.
SCHEDULING = "scheduling"


class SleepAnswer(BaseModel):
    """The server sleeps."""

    status: str = Field(default="sleeping", description="Always sleeping.")
    level: int = Field(description="0: nothing is released; 1: KV; 2: KV and weights.")
    mode: str = Field(description="The mode of the pause.")


class WakeAnswer(BaseModel):
    """The memory that is allocated again."""

    status: str = Field(description="awake, or sleeping while some memory is released.")
    tags: list[str] = Field(description="The memory that is still released.")


class IsSleeping(BaseModel):
    """True if memory is released."""

    is_sleeping: bool = Field(description="True until memory is allocated again.")


class MemoryTags(OpenForm):
    """SGLang's body for releasing and resuming memory."""

    without_effect = frozenset({"rid"})

    tags: list[Literal["weights", "kv_cache", "cuda_graph"]] | None = Field(
        None, description="The memory to release or to allocate; all by default."
    )


@routes.post("/sleep")
async def sleep(
    engine: EngineDep,
    level: Annotated[int, Query(ge=0, le=2)] = 1,
    mode: PauseMode = PauseMode.ABORT,
) -> SleepAnswer:
    """Pause, and release the memory of KV (level 1), or of KV and weights (level 2) (vLLM)."""
    await engine.control.sleep(level, mode)
    return SleepAnswer(level=level, mode=mode.value)


@routes.post("/wake_up")
async def wake_up(
    engine: EngineDep, tags: Annotated[list[str] | None, Query()] = None
) -> WakeAnswer:
    """Allocate memory again (vLLM); requests resume once all is allocated."""
    wanted = [tag for tag in tags if tag != SCHEDULING] if tags else None
    asleep = list(await engine.control.wake_up(wanted))
    return WakeAnswer(status="sleeping" if asleep else "awake", tags=asleep)


@routes.get("/is_sleeping")
async def is_sleeping(engine: EngineDep) -> IsSleeping:
    """Return true if memory is released (vLLM)."""
    return IsSleeping(is_sleeping=engine.control.sleep_level > 0)


@routes.post("/release_memory_occupation", dialect=SGLANG)
async def release_memory(engine: EngineDep, body: MemoryTags | None = None) -> MessageAnswer:
    """Release memory (SGLang); requests are kept, and recomputed afterwards."""
    tags = _known(body)
    if tags:
        await engine.control.sleep(2 if WEIGHTS in tags else 1, PauseMode.KEEP)
    return MessageAnswer(message="Memory is given back.")


@routes.post("/resume_memory_occupation", dialect=SGLANG)
async def resume_memory(engine: EngineDep, body: MemoryTags | None = None) -> MessageAnswer:
    """Allocate memory again (SGLang); requests resume once all is allocated."""
    tags = _known(body)
    asleep = await engine.control.wake_up(tags) if tags else ()
    message = f"Still put away: {', '.join(asleep)}." if asleep else "Memory is there again."
    return MessageAnswer(message=message)


def _known(body: MemoryTags | None) -> list[str]:
    """Return the tags of a body that mean something here; all tags if it has none."""
    if body is None or body.tags is None:
        return list(SLEEP_TAGS)
    return [tag for tag in body.tags if tag in (WEIGHTS, KV_CACHE)]
