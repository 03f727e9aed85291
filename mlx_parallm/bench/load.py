"""The drivers of a workload: a closed loop with a number of clients, or open-loop arrivals."""

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
    """Send the requests in order from ``concurrency`` clients; return the records in that order.

    A client sends one request at a time. The clients start spread over ``ramp_s`` seconds, because
    a burst of connections measures the listen queue, not the server.
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
    """Send each request at its ``arrival_s``; return the records in the order of the requests.

    ``max_concurrency`` bounds the requests in flight. Requests over the bound wait, and their times
    count from the moment they are sent.
    """
    loop = asyncio.get_running_loop()
    begin = loop.time()
    gate = asyncio.Semaphore(max_concurrency or max(len(requests), 1))

    async def send_on_time(planned: PlannedRequest) -> RequestRecord:
        await asyncio.sleep(max(0.0, begin + planned.arrival_s - loop.time()))
        async with gate:
            record = await send(planned)
        if on_record:
            on_record(record)
        return record

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send_on_time(planned)) for planned in requests]
    return [task.result() for task in tasks]
