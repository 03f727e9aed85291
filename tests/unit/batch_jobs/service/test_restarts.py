"""Servers that end anywhere, and clients that go, cost no answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from mlx_parallm.batch_jobs.answers import LineResponse
from mlx_parallm.batch_jobs.records import BatchRecord, State
from mlx_parallm.batch_jobs.service import BatchOrder
from mlx_parallm.types.errors import ShuttingDownError, StorageError
from tests.unit.batch_jobs.service.batch_world import (
    ENDPOINT,
    NUM_PLACES,
    World,
    answer_at_once,
    good,
    lines,
)


@pytest.mark.parametrize("stop_after", range(0, 13, 2))
async def test_a_server_that_ends_anywhere_answers_every_line_once(
    world: World, stop_after: int
) -> None:
    hang = asyncio.Event()

    async def stop_at(_: str, body: dict[str, Any]) -> LineResponse:
        if len(world.sent) > stop_after:
            await hang.wait()
        return good(body["number"])

    world.handler = stop_at
    record = await world.create(12)
    await world.until(record, lambda _: len(world.sent) >= min(stop_after + 1, 12))
    await world.restart()
    hang.set()
    world.handler = answer_at_once
    record = await world.end_of(record)
    output, errors = await world.results(record)
    assert errors == []
    assert [answer["response"]["body"]["answer"] for answer in output] == list(range(12))
    # Only lines in flight are sent twice.
    assert sum(count - 1 for count in Counter(world.sent).values()) <= NUM_PLACES


async def test_a_draining_server_lets_lines_end_and_the_next_one_goes_on(world: World) -> None:
    release = asyncio.Event()

    async def drain(_: str, body: dict[str, Any]) -> LineResponse:
        if body["number"] == 2:
            raise ShuttingDownError("no")
        await release.wait()
        return good(body["number"])

    world.handler = drain
    record = await world.create(9)
    await world.until(record, lambda _: len(world.sent) == 3)
    release.set()
    await world.until(record, lambda current: current.completed == 2)
    assert len(world.sent) <= 4
    world.handler = answer_at_once
    await world.restart()
    record = await world.end_of(record)
    assert (record.status, record.completed) == ("completed", 9)
    assert Counter(world.sent)["me", 0] == 1


async def test_a_crash_while_the_files_are_written_does_not_double_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = await world.create(4)
    store = await world.service.files()
    commit = store.commit
    committed = asyncio.Event()

    async def commit_and_hang(*args: Any, **kwargs: Any) -> Any:
        await commit(*args, **kwargs)
        committed.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(store, "commit", commit_and_hang)
    await committed.wait()
    await world.restart()
    record = await world.end_of(record)
    assert record.status == "completed"
    assert len((await world.results(record))[0]) == 4
    files, _ = await (await world.service.files()).list("me", limit=99)
    assert {file.id for file in files} == {record.input_file_id, record.output_file_id}
    assert Counter(number for _, number in world.sent).most_common(1)[0][1] == 1


async def test_a_batch_runs_though_its_client_went_while_it_was_made(world: World) -> None:
    file_id = await world.upload(lines(2))
    batches: list[BatchRecord] = []
    num_rounds = 0
    # A thread looks at the file first, for however many rounds of the loop.
    while num_rounds < 20 or not batches:
        order = BatchOrder(input_file_id=file_id, endpoint=ENDPOINT)
        making = asyncio.ensure_future(world.service.create("me", order))
        for _ in range(num_rounds):
            await asyncio.sleep(0)
        making.cancel()
        with suppress(asyncio.CancelledError):
            await making
        # A batch is there whole or not at all.
        batches, _ = await world.service.list("me", limit=99)
        for batch in batches:
            assert (await world.end_of(batch)).status == State.COMPLETED
        num_rounds += 1 + num_rounds // 8


async def test_a_batch_that_is_made_while_the_service_stops_begins_nothing(world: World) -> None:
    file_id = await world.upload(lines(2))
    for num_rounds in range(12):
        order = BatchOrder(input_file_id=file_id, endpoint=ENDPOINT)
        making = asyncio.ensure_future(world.service.create("me", order))
        for _ in range(num_rounds):
            await asyncio.sleep(0)
        stopping = asyncio.ensure_future(world.service.stop())
        with suppress(StorageError):
            await making
        await stopping
        assert world.service._drivers == {}
        world.service = world.make()
