"""Drives a workload: a fixed number of clients in a closed loop, or arrivals in an open one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from mlx_parallm.bench.record import PlannedRequest, RequestRecord

Send = Callable[[PlannedRequest], Awaitable[RequestRecord]]
OnRecord = Callable[[RequestRecord], None]


async def closed_loop(
    requests: Sequence[PlannedRequest],
    send: Send,
    *,
    concurrency: int,
    ramp_s: float = 0.0,
    on_record: OnRecord | None = None,
) -> list[RequestRecord]:
    """Let ``concurrency`` clients work the requests off, each one at a time, in their order.

    The clients begin spread over ``ramp_s`` seconds: a burst of connections measures the listen
    queue, not the server. Returns the records in the order of the requests.
    """
    pending = iter(requests)
    records: list[RequestRecord] = []

    async def client(delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        for planned in pending:
            record = await send(planned)
            records.append(record)
            if on_record:
                on_record(record)

    async with asyncio.TaskGroup() as group:
        for number in range(concurrency):
            group.create_task(client(ramp_s * number / concurrency))
    return sorted(records, key=lambda record: record.index)


async def open_loop(
    requests: Sequence[PlannedRequest],
    send: Send,
    *,
    max_concurrency: int | None = None,
    on_record: OnRecord | None = None,
) -> list[RequestRecord]:
    """Send each request at its ``arrival_s``, whether or not earlier ones have finished.

    ``max_concurrency`` bounds what is in flight; requests over it wait for their turn, and their
    times count from the turn. Returns the records in the order of the requests.
    """
    loop = asyncio.get_running_loop()
    begin = loop.time()
    gate = asyncio.Semaphore(max_concurrency or max(len(requests), 1))

    async def one(planned: PlannedRequest) -> RequestRecord:
        await asyncio.sleep(max(0.0, begin + planned.arrival_s - loop.time()))
        async with gate:
            record = await send(planned)
        if on_record:
            on_record(record)
        return record

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(planned)) for planned in requests]
    return [task.result() for task in tasks]
