"""Records that a full disk refuses are saved later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

from mlx_parallm.batch_jobs import service, store
from mlx_parallm.batch_jobs.answers import LineResponse
from mlx_parallm.batch_jobs.files import Upload
from mlx_parallm.batch_jobs.records import BatchRecord, FileRecord, State
from mlx_parallm.batch_jobs.service import BatchOrder
from mlx_parallm.storage.database import Connection, put
from mlx_parallm.types.errors import InvalidRequestError, StorageError
from tests.unit.batch_jobs.service.batch_world import ENDPOINT, World, answer_at_once, hang, lines


class FullOnce:
    """A disk that refuses a record once: the one that ``num_left`` others come before.

    Attributes:
        states: those of batches that were saved.
        num_files: how many records of files were saved.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_left = -1
        self.states: set[str] = set()
        self.num_files = 0
        for module in ("store", "files"):
            monkeypatch.setattr(f"mlx_parallm.batch_jobs.{module}.put", self.put)

    def put(self, db: Connection, table: str, record: BatchRecord | FileRecord) -> None:
        self.num_left -= 1
        if self.num_left == -1:
            raise StorageError("full")
        put(db, table, record)
        if isinstance(record, BatchRecord):
            self.states.add(record.status)
        else:
            self.num_files += 1


async def all_answered(world: World, record: BatchRecord) -> State:
    world.handler = answer_at_once
    return State.COMPLETED


async def a_line_is_bad(world: World, record: BatchRecord) -> State:
    files = await world.service.files()
    files.path(await files.get(record.input_file_id, "me")).write_text("{")
    return State.FAILED


async def the_input_goes(world: World, record: BatchRecord) -> State:
    files = await world.service.files()
    files.path(await files.get(record.input_file_id, "me")).unlink()
    return State.FAILED


async def the_server_has_a_bug(world: World, record: BatchRecord) -> State:
    async def bug(*_: object) -> LineResponse:
        raise ZeroDivisionError

    world.handler = bug
    return State.FAILED


async def cancelled_at_once(world: World, record: BatchRecord) -> State:
    with suppress(StorageError):
        await world.service.cancel(record.id, "me")
    return State.CANCELLED


async def cancelled_while_it_runs(world: World, record: BatchRecord) -> State:
    await world.until(record, lambda _: len(world.sent) >= 2)
    return await cancelled_at_once(world, record)


async def it_expires(world: World, record: BatchRecord) -> State:
    world.now += 24 * 3600
    return State.EXPIRED


ENDS = [
    all_answered, a_line_is_bad, the_input_goes, the_server_has_a_bug, cancelled_at_once,
    cancelled_while_it_runs, it_expires,
]  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
async def test_a_state_that_the_disk_refused_once_is_saved_later(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[World, BatchRecord], Awaitable[State]],
) -> None:
    # The disk refuses each record in turn, and clients see only what was saved.
    monkeypatch.setattr(service, "RETRY_S", 0.0)
    disk = FullOnce(monkeypatch)
    num_before = 0
    while disk.num_left < 0:
        world.handler, world.sent = hang, []
        file_id = await world.upload(lines(2))
        disk.num_left, disk.states, disk.num_files = num_before, set(), 0
        order = BatchOrder(input_file_id=file_id, endpoint=ENDPOINT)
        try:
            record = await world.service.create("me", order)
        except StorageError:
            assert num_before == 0
            record = await world.service.create("me", order)
        state = await end(world, record)
        ended = await world.until(record, lambda current: shown(current, disk).has_ended)
        assert ended.status == state
        # Lines may be sent again only where their answers were not kept.
        assert max(Counter(world.sent).values(), default=1) == 1 or state == State.FAILED
        # Results are written once.
        assert disk.num_files == 2 - (ended.output_file_id, ended.error_file_id).count(None)
        num_before += 1
        await world.restart()
        assert await world.service.get(record.id, "me") == ended
        output, errors = await world.results(ended)
        assert len(output) + len(errors) in ((2,) if ended.finalizing_at else (0, 2))
    # Beginning, end and, in most, states between were refused.
    assert num_before > len(disk.states) >= 2
    assert not list(world.folder.rglob("*.journal"))
    assert not list(world.folder.rglob("new-*"))


def shown(record: BatchRecord, disk: FullOnce) -> BatchRecord:
    assert record.status in disk.states
    return record


async def test_a_cancellation_that_the_disk_refuses_is_an_error_until_it_is_saved(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.handler = hang
    record = await world.create(2)
    await world.until(record, lambda _: len(world.sent) == 2)
    is_full = True

    def refuse(*args: Any) -> None:
        if is_full:
            raise StorageError("full")
        put(*args)

    monkeypatch.setattr(store, "put", refuse)
    for _ in range(2):
        with pytest.raises(StorageError):
            await world.service.cancel(record.id, "me")
        assert (await world.service.get(record.id, "me")).status == State.IN_PROGRESS
    is_full = False
    assert (await world.service.cancel(record.id, "me")).status == State.CANCELLING
    monkeypatch.setattr(service, "RETRY_S", 0.0)
    await world.restart()
    assert (await world.end_of(record)).status == State.CANCELLED


@pytest.mark.parametrize("end", [the_server_has_a_bug, all_answered])
async def test_an_end_that_the_disk_refused_is_not_cancelled(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[World, BatchRecord], Awaitable[State]],
) -> None:
    num_refused, is_full = 0, True

    def refuse(db: Connection, table: str, record: BatchRecord) -> None:
        nonlocal num_refused
        if record.has_ended and is_full:
            num_refused += 1
            raise StorageError("full")
        put(db, table, record)

    monkeypatch.setattr(store, "put", refuse)
    world.handler = hang
    record = await world.create(2)
    state = await end(world, record)
    before = await world.until(record, lambda _: num_refused > 0)
    assert not before.has_ended
    with pytest.raises(StorageError):
        await world.service.cancel(record.id, "me")
    assert not (await world.service.get(record.id, "me")).has_ended
    is_full = False
    with pytest.raises(InvalidRequestError, match=f"batch that is {state} cannot"):
        await world.service.cancel(record.id, "me")
    ended = await world.service.get(record.id, "me")
    assert (ended.status, ended.cancelling_at) == (state, None)
    assert world.service._runs == {}
    await world.restart()
    assert await world.service.get(record.id, "me") == ended


async def test_a_file_of_results_that_cannot_be_begun_leaves_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "RETRY_S", 0.0)
    files = await world.service.files()
    begin, calls = files.begin, 0

    async def begin_or_fail(*, is_limited: bool = True) -> Upload:
        nonlocal calls
        calls += not is_limited
        if calls == 2:
            raise StorageError("full")
        return await begin(is_limited=is_limited)

    monkeypatch.setattr(files, "begin", begin_or_fail)
    record = await world.end_of(await world.create(2))
    assert (record.status, calls) == (State.COMPLETED, 4)
    assert not list(world.folder.rglob("new-*"))
    assert files._uploads == set()
