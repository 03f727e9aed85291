"""Servers open, lock and free the data folder."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.batch_jobs import service
from mlx_parallm.batch_jobs.answers import LineResponse
from mlx_parallm.batch_jobs.records import State
from mlx_parallm.batch_jobs.service import BatchOrder
from mlx_parallm.batch_jobs.storage import Storage
from mlx_parallm.storage.disk import FolderLock
from mlx_parallm.types.errors import ShuttingDownError, StorageError, StorageInUseError
from tests.unit.batch_jobs.service.batch_world import ENDPOINT, World, answer_at_once, good, hang


async def test_a_folder_that_is_not_there_is_made_at_start(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.service.start()
    while not (world.folder / "records.db").exists():  # noqa: ASYNC110 - a thread makes it
        await asyncio.sleep(0)
    second = World(world.folder)
    second.service.start()
    while "not available" not in caplog.text:  # noqa: ASYNC110 - a thread finds it out
        await asyncio.sleep(0)
    # Neither batch has had a request yet.
    assert f"Another server (process {os.getpid()}) uses the data folder" in caplog.text
    assert str(world.folder) in caplog.text
    assert await world.service.list("me", limit=1) == ([], False)
    await second.service.stop()


async def test_a_service_that_has_stopped_opens_its_folder_for_no_request(world: World) -> None:
    world.handler = hang
    record = await world.create(2)
    await world.until(record, lambda _: len(world.sent) == 2)
    await world.service.stop()
    order = BatchOrder(input_file_id=record.input_file_id, endpoint=ENDPOINT)
    for request in (
        world.service.files(),
        world.service.create("me", order),
        world.service.get(record.id, "me"),
        world.service.list("me", limit=1),
        world.service.cancel(record.id, "me"),
    ):
        with pytest.raises(ShuttingDownError):
            await request
    FolderLock(world.folder).release()
    assert (len(world.sent), world.service._drivers) == (2, {})


@pytest.mark.parametrize("num_cancels", [1, 2])
async def test_batches_go_on_though_the_request_that_opened_the_folder_was_cancelled(
    world: World, monkeypatch: pytest.MonkeyPatch, num_cancels: int
) -> None:
    world.handler = hang
    record = await world.create(2)
    await world.service.stop()
    world.service, world.handler = world.make(), answer_at_once
    may_open = threading.Event()

    def slow(*args: Any) -> Storage:
        may_open.wait()
        return Storage(*args)

    monkeypatch.setattr(service, "Storage", slow)
    opening = asyncio.ensure_future(world.service.list("me", limit=1))
    for _ in range(num_cancels):
        await asyncio.sleep(0)
        opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    others = [asyncio.ensure_future(world.service.get(record.id, "me")) for _ in range(2)]
    await asyncio.sleep(0)
    may_open.set()
    assert [batch.id for batch in await asyncio.gather(*others)] == [record.id] * 2
    assert (await world.end_of(record)).status == State.COMPLETED


async def test_an_opener_that_is_cancelled_alone_leaves_no_batch_waiting(world: World) -> None:
    world.handler = hang
    await world.create(2)
    await world.service.stop()
    world.service, world.handler, world.sent = world.make(), answer_at_once, []
    opening = asyncio.ensure_future(world.service.list("me", limit=1))
    await asyncio.sleep(0)
    opening.cancel()
    while not world.sent:  # noqa: ASYNC110 - a line of the earlier batch is sent at last
        await asyncio.sleep(0)


async def test_a_service_that_stops_while_it_opens_frees_the_folder_and_runs_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.handler = hang
    await world.create(2)
    await world.service.stop()
    world.service, world.sent = world.make(), []
    may_open = threading.Event()

    def slow(*args: Any) -> Storage:
        may_open.wait()
        return Storage(*args)

    monkeypatch.setattr(service, "Storage", slow)
    world.service.start()
    await asyncio.sleep(0)
    stopping = asyncio.ensure_future(world.service.stop())
    await asyncio.sleep(0)
    may_open.set()
    await stopping
    FolderLock(world.folder).release()
    assert (world.sent, world.service._drivers) == ([], {})


async def test_a_second_server_waits_until_the_folder_is_free(world: World) -> None:
    hang = asyncio.Event()

    async def wait(_: str, body: dict[str, Any]) -> LineResponse:
        await hang.wait()
        return good(body["number"])

    world.handler = wait
    record = await world.create(2)
    second = World(world.folder)
    second.service.start()
    with pytest.raises(StorageInUseError, match=f"Another server .process {os.getpid()}. uses"):
        await second.service.list("me", limit=1)
    await world.service.stop()
    assert (await second.end_of(record)).completed == 2
    await second.service.stop()


async def test_a_freed_folder_is_taken_without_a_request(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks the second server for files, and the batches of the first go on all the same."""
    monkeypatch.setattr(service, "RETRY_S", 0.0)
    is_resumed = asyncio.Event()

    async def hang(_: str, _body: dict[str, Any]) -> LineResponse:
        await asyncio.Event().wait()
        raise AssertionError

    async def answer(_: str, body: dict[str, Any]) -> LineResponse:
        is_resumed.set()
        return good(body["number"])

    world.handler = hang
    await world.create(2)
    second = World(world.folder)
    second.handler = answer
    second.service.start()
    await world.service.stop()
    await is_resumed.wait()
    await second.service.stop()


@pytest.mark.parametrize("content", ["", "{}", "[]", "{", '{"pid": null}', '{"pid": "1"}'])
def test_a_holder_that_has_not_said_who_it_is(tmp_path: Path, content: str) -> None:
    lock = FolderLock(tmp_path)
    (tmp_path / "lock").write_text(content)
    with pytest.raises(StorageInUseError, match=r"^Another server uses"):
        FolderLock(tmp_path)
    lock.release()
    FolderLock(tmp_path).release()
    assert (tmp_path / "lock").read_text() == ""


@pytest.mark.parametrize("function", ["os.write", "os.ftruncate", "fcntl.flock"])
def test_a_full_disk_is_not_mistaken_for_another_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = len(os.listdir("/dev/fd"))
    with monkeypatch.context() as patched:
        patched.setattr(function, fail)
        for _ in range(3):
            with pytest.raises(StorageError, match="No space left on device") as refusal:
                FolderLock(tmp_path)
            assert not isinstance(refusal.value, StorageInUseError)
    assert len(os.listdir("/dev/fd")) == before
    # Once there is room, nobody has it.
    FolderLock(tmp_path).release()
