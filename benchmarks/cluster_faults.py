"""Faults of one rank of a server while it answers, and what follows them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from subprocess import TimeoutExpired
from typing import Any, Literal

import httpx2

from benchmarks.launched_world import LaunchedWorld
from mlx_parallm.client import RequestFailedError, RLClient

PROMPT = "1, 2, 3,"
#: ``NUM_STREAMS``: streams that run when the rank fails.
NUM_STREAMS = 4
POLL_S = 0.02


@dataclass
class Fault:
    """The effect of a fault of one rank.

    Attributes:
        num_errors: streams that ended with an error event.
        unhealthy_s: seconds until ``/health`` did not answer 200.
        ended_s: seconds until all ranks had ended; NaN if they did not.
    """

    num_errors: int
    unhealthy_s: float
    ended_s: float


async def break_rank(world: LaunchedWorld, how: Literal["kill", "stop"], end_s: float) -> Fault:
    """Kill or stop rank 1 while streams run, and return what follows within ``end_s``."""
    url = world.base_url
    async with RLClient(url) as client, httpx2.AsyncClient(base_url=url) as http:
        streams = [asyncio.create_task(_stream(client)) for _ in range(NUM_STREAMS)]
        await _until(lambda: _all_run(http))
        began = time.perf_counter()
        world.tell(how, 1)
        await _until(lambda: _is_unhealthy(http))
        unhealthy_s = time.perf_counter() - began
        errors = await asyncio.gather(*streams, return_exceptions=True)
    ended_s = float("nan")
    with suppress(TimeoutExpired):
        await asyncio.to_thread(world.wait, end_s)
        ended_s = time.perf_counter() - began
    num_errors = sum(isinstance(error, RequestFailedError) for error in errors)
    return Fault(num_errors, unhealthy_s, ended_s)


async def _stream(client: RLClient) -> None:
    options: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True, "temperature": 0.0}
    async for _ in client.stream_rollout([PROMPT], **options):
        pass


async def _all_run(http: httpx2.AsyncClient) -> bool:
    text = (await http.get("/metrics")).text
    running = (line for line in text.splitlines() if line.startswith("vllm:num_requests_running"))
    return sum(float(line.rpartition(" ")[2]) for line in running) >= NUM_STREAMS


async def _is_unhealthy(http: httpx2.AsyncClient) -> bool:
    try:
        return (await http.get("/health")).status_code != 200
    except httpx2.TransportError:
        return True


async def _until(is_so: Callable[[], Awaitable[bool]]) -> None:
    while True:
        if await is_so():
            return
        await asyncio.sleep(POLL_S)
