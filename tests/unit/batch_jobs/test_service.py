"""Batches from beginning to end, over an application that tests play."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.batch_jobs import service, store
from mlx_parallm.batch_jobs.answers import LineResponse, Usage
from mlx_parallm.batch_jobs.files import FileLimits, Upload
from mlx_parallm.batch_jobs.records import BatchRecord, FileRecord, State
from mlx_parallm.batch_jobs.run import MAX_LOST_TOGETHER, MAX_TRIES, growing_delay
from mlx_parallm.batch_jobs.service import BatchLimits, BatchOrder, BatchService
from mlx_parallm.batch_jobs.storage import Storage
from mlx_parallm.batch_jobs.store import MAX_OPEN
from mlx_parallm.storage.database import Connection, put
from mlx_parallm.storage.disk import FolderLock
from mlx_parallm.types.errors import (
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    ShuttingDownError,
    StorageError,
    StorageInUseError,
)

ENDPOINT = "/v1/completions"
NUM_PLACES = 3
Handler = Callable[[str, dict[str, Any]], Awaitable[LineResponse]]
USAGE = {
    "prompt_tokens": 2,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 1},
}


def good(number: int) -> LineResponse:
    return LineResponse(200, "id", {"answer": number, "usage": USAGE})


def failing(status: int) -> LineResponse:
    return LineResponse(status, "id", {"error": {"message": "no"}})


async def answer_at_once(_: str, body: dict[str, Any]) -> LineResponse:
    return good(body["number"])


class World:
    """A data folder, and the services that come and go over it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.handler: Handler = answer_at_once
        self.sent: list[tuple[str, int]] = []
        self.now = 1000.0
        self.delays: list[int] = []
        self.service = self.make()

    def make(self) -> BatchService:
        files = FileLimits(max_file_bytes=2**20, max_total_bytes=2**30)
        limits = BatchLimits(files=files, max_line_bytes=10_000, max_samples=NUM_PLACES)
        return BatchService(
            self.folder, limits, self.send, now=lambda: self.now, delay=self.no_delay
        )

    def no_delay(self, num_tries: int) -> float:
        self.delays.append(num_tries)
        return 0

    async def send(
        self, owner: str, url: str, body: dict[str, Any], request_id: str
    ) -> LineResponse:
        assert url == ENDPOINT
        assert request_id.startswith("batch_req_")
        self.sent.append((owner, body["number"]))
        return await self.handler(owner, body)

    async def restart(self) -> None:
        await self.service.stop()
        self.service = self.make()
        self.service.start()

    async def upload(self, content: bytes, owner: str = "me", purpose: str = "batch") -> str:
        files = await self.service.files()
        upload = await files.begin()
        upload.claim(len(content))
        upload.write(content)
        record = await files.commit(upload, owner=owner, filename="in", purpose=purpose)
        return record.id

    async def create(self, num_lines: int, owner: str = "me", **more: Any) -> BatchRecord:
        file_id = await self.upload(lines(num_lines, **more), owner)
        return await self.service.create(
            owner, BatchOrder(input_file_id=file_id, endpoint=ENDPOINT, metadata={"a": "b"})
        )

    async def until(self, record: BatchRecord, is_so: Callable[[BatchRecord], bool]) -> BatchRecord:
        while True:
            current = await self.service.get(record.id, record.owner)
            if is_so(current):
                return current
            await asyncio.sleep(0)

    async def end_of(self, record: BatchRecord) -> BatchRecord:
        return await self.until(record, lambda current: current.has_ended)

    async def results(
        self, record: BatchRecord
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        files = await self.service.files()

        async def read(file_id: str | None) -> list[dict[str, Any]]:
            if file_id is None:
                return []
            file = await files.get(file_id, record.owner)
            assert file.num_bytes
            text = files.path(file).read_text("utf-8")
            return [json.loads(line) for line in text.splitlines()]

        return await read(record.output_file_id), await read(record.error_file_id)


def lines(count: int, **more: Any) -> bytes:
    entries = [
        {"custom_id": f"c{n}", "method": "POST", "url": ENDPOINT, "body": {"number": n} | more}
        for n in range(count)
    ]
    return "\n".join(json.dumps(entry) for entry in entries).encode()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path / "data")
    yield world
    await world.service.stop()


async def test_a_batch_from_beginning_to_end(world: World) -> None:
    async def some_fail(_: str, body: dict[str, Any]) -> LineResponse:
        return failing(400) if body["number"] % 4 == 1 else good(body["number"])

    world.handler = some_fail
    record = await world.create(10, model="m")
    assert record.status == State.VALIDATING
    record = await world.end_of(record)
    output, errors = await world.results(record)
    assert [answer["custom_id"] for answer in output] == [f"c{n}" for n in range(10) if n % 4 != 1]
    assert [answer["custom_id"] for answer in errors] == ["c1", "c5", "c9"]
    assert output[0]["response"] == {"status_code": 200, "request_id": "id", "body": good(0).body}
    assert output[0]["error"] is None
    assert errors[0]["response"]["status_code"] == 400
    assert (record.status, record.total, record.completed, record.failed) == ("completed", 10, 7, 3)
    assert record.model == "m"
    assert record.in_progress_at == record.finalizing_at == record.completed_at == 1000
    assert record.usage == {
        "input_tokens": 14, "input_tokens_details": {"cached_tokens": 7},
        "output_tokens": 21, "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 35,
    }  # fmt: skip
    await world.restart()
    assert await world.service.get(record.id, "me") == record
    assert not list(world.folder.rglob("*.journal"))


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


async def test_a_failing_server_is_asked_again_some_times_and_a_busy_one_until_it_answers(
    world: World,
) -> None:
    statuses = {0: [500, 503], 1: [500] * 99, 2: [429] * 20, 3: [501] * 9}
    # The status is that of a restarting engine, and its counterpart on Anthropic's routes.
    statuses |= {4: [503] * 20, 5: [529] * 20}

    async def trouble(_: str, body: dict[str, Any]) -> LineResponse:
        left = statuses[body["number"]]
        return failing(left.pop()) if left else good(body["number"])

    world.handler = trouble
    record = await world.end_of(await world.create(6))
    output, errors = await world.results(record)
    assert [answer["custom_id"] for answer in output] == ["c0", "c2", "c4", "c5"]
    assert [answer["response"]["status_code"] for answer in errors] == [500, 501]
    counts = Counter(number for _, number in world.sent)
    assert [counts[n] for n in range(6)] == [3, MAX_TRIES, 21, 1, 21, 21]
    assert [growing_delay(n) for n in (1, 2, 3, 99)] == [1, 2, 4, 60]


def lost(status: int = 503) -> LineResponse:
    """Return the answer to a line whose engine died."""
    return replace(failing(status), error_code="request_lost")


class MortalEngine:
    """Dies of some lines, with all lines that it computes then, and refuses lines until it is back.

    Lines that are ``deadly`` kill it after 20 rounds of the event loop; the others, unless it dies,
    are answered after as many as their ``rounds`` say.
    """

    def __init__(self) -> None:
        self.num_deaths = self.num_refused = 0
        self.num_lost: Counter[str] = Counter()
        # Set once the life has ended.
        self._end = asyncio.Event()

    async def __call__(self, owner: str, body: dict[str, Any]) -> LineResponse:
        end = self._end
        if end.is_set():
            self.num_refused += 1
            if self.num_refused % 20 == 0:
                self._end = asyncio.Event()
            return replace(failing(503), error_code="engine_dead")
        # Lines that are sent together are computed together.
        for _ in range(body.get("rounds", 20)):
            await asyncio.sleep(0)
        if body["number"] in body.get("deadly", [0]) and not end.is_set():
            self.num_deaths += 1
            end.set()
        self.num_lost[owner] += end.is_set()
        return lost() if end.is_set() else good(body["number"])


async def test_a_line_that_kills_its_engine_fails_and_the_others_are_answered(world: World) -> None:
    world.handler = engine = MortalEngine()
    record = await world.end_of(await world.create(3 * NUM_PLACES))
    assert engine.num_deaths == MAX_TRIES
    # An engine that is being restarted is no failure, however often a line finds it so.
    assert engine.num_refused == 20 * MAX_TRIES
    assert (record.completed, record.failed) == (3 * NUM_PLACES - 1, 1)
    _, [error] = await world.results(record)
    assert (error["custom_id"], error["response"]["status_code"]) == ("c0", 503)


@pytest.mark.parametrize("num_deadly", [1, 2, 6])
async def test_a_line_is_not_lost_to_those_of_other_owners_for_ever(
    world: World, num_deadly: int
) -> None:
    engine, all_wait = MortalEngine(), asyncio.Event()

    async def answer(owner: str, body: dict[str, Any]) -> LineResponse:
        await all_wait.wait()
        return await engine(owner, body)

    world.handler = answer
    # Their lines are still computed when one of the others kills the engine.
    innocent = [await world.create(1, owner, deadly=[], rounds=60) for owner in ("a", "b")]
    deadly = await world.create(num_deadly, "bad", deadly=[*range(num_deadly)])
    await world.until(deadly, lambda _: len(world.sent) == NUM_PLACES)
    all_wait.set()
    for record in innocent:
        assert (await world.end_of(record)).completed == 1
        assert engine.num_lost[record.owner] <= MAX_LOST_TOGETHER
    assert (await world.end_of(deadly)).failed == num_deadly
    assert engine.num_lost["bad"] == num_deadly * MAX_TRIES
    # All places are free again.
    assert world.service._places.num_taken == 0


@pytest.mark.parametrize("status", [503, 529])
async def test_a_lost_line_is_a_failure_whatever_its_status(world: World, status: int) -> None:
    async def lose(_: str, body: dict[str, Any]) -> LineResponse:
        return lost(status)

    world.handler = lose
    record = await world.end_of(await world.create(1))
    assert (record.failed, len(world.sent)) == (1, MAX_TRIES)


async def test_no_more_samples_than_places_and_every_line_gets_its_turn(world: World) -> None:
    held = most = 0

    async def measure(_: str, body: dict[str, Any]) -> LineResponse:
        nonlocal held, most
        held += 1
        most = max(most, held)
        await asyncio.sleep(0)
        held -= 1
        return good(body["number"])

    world.handler = measure
    assert (await world.end_of(await world.create(20))).completed == 20
    assert most == NUM_PLACES
    most = 0
    # Each line wants more places than there are, so lines run one at a time.
    assert (await world.end_of(await world.create(5, n=50))).completed == 5
    assert most == 1


async def test_owners_take_turns(world: World) -> None:
    both_wait = asyncio.Event()

    async def answer(_: str, body: dict[str, Any]) -> LineResponse:
        await both_wait.wait()
        return good(body["number"])

    world.handler = answer
    records = [await world.create(12, owner) for owner in ("a", "b")]
    # The first batch has all places, and a line of each batch waits for one.
    await world.until(records[1], lambda _: len(world.service._places._waiting.get(None, ())) == 2)
    both_wait.set()
    for record in records:
        await world.end_of(record)
    first_b = next(place for place, (owner, _) in enumerate(world.sent) if owner == "b")
    assert first_b <= NUM_PLACES + 1
    with pytest.raises(NotFoundError):
        await world.service.get(records[0].id, "b")
    with pytest.raises(NotFoundError):
        await world.service.cancel(records[0].id, "b")
    listed, has_more = await world.service.list("a", limit=9)
    assert ([batch.id for batch in listed], has_more) == ([records[0].id], False)


async def test_a_cancelled_batch_keeps_its_answers_and_tells_of_the_rest(world: World) -> None:
    async def some_hang(_: str, body: dict[str, Any]) -> LineResponse:
        if body["number"] >= 4:
            await asyncio.Event().wait()
        return good(body["number"])

    world.handler = some_hang
    record = await world.create(10)
    await world.until(record, lambda current: current.completed == 4)
    waiting = await world.create(3)
    assert (await world.service.cancel(record.id, "me")).status == State.CANCELLING
    assert (await world.service.cancel(record.id, "me")).status == State.CANCELLING
    assert (await world.service.cancel(waiting.id, "me")).status == State.CANCELLING
    record, waiting = await world.end_of(record), await world.end_of(waiting)
    output, errors = await world.results(record)
    assert [answer["custom_id"] for answer in output] == ["c0", "c1", "c2", "c3"]
    assert [answer["custom_id"] for answer in errors] == [f"c{n}" for n in range(4, 10)]
    assert {answer["error"]["code"] for answer in errors} == {"batch_cancelled"}
    assert (record.status, record.completed, record.failed) == ("cancelled", 4, 6)
    assert (waiting.status, waiting.output_file_id, waiting.error_file_id) == (
        "cancelled", None, None,
    )  # fmt: skip
    with pytest.raises(InvalidRequestError, match="cancelled"):
        await world.service.cancel(record.id, "me")
    # The batch's input may be deleted now.
    await (await world.service.files()).delete(record.input_file_id, "me")


async def test_an_expired_batch_keeps_its_answers_and_tells_of_the_rest(world: World) -> None:
    async def some_hang(_: str, body: dict[str, Any]) -> LineResponse:
        if body["number"] >= 2:
            await asyncio.Event().wait()
        return good(body["number"])

    world.handler = some_hang
    record = await world.create(5)
    await world.until(record, lambda current: current.completed == 2)
    world.now += 24 * 3600
    await world.restart()
    record = await world.end_of(record)
    output, errors = await world.results(record)
    assert [answer["custom_id"] for answer in output] == ["c0", "c1"]
    assert [answer["error"]["code"] for answer in errors] == ["batch_expired"] * 3
    assert record.status == "expired"
    assert record.expired_at == world.now


async def test_a_bad_file_fails_with_its_lines_and_nothing_is_sent(world: World) -> None:
    file_id = await world.upload(lines(2) + b"\n{\n" + lines(1))
    order = BatchOrder(input_file_id=file_id, endpoint=ENDPOINT)
    record = await world.end_of(await world.service.create("me", order))
    assert record.status == "failed"
    assert [(error["line"], error["code"]) for error in record.errors or ()] == [
        (3, "invalid_json_line"), (4, "duplicate_custom_id"),
    ]  # fmt: skip
    assert world.sent == []


async def test_a_batch_needs_a_file_of_its_owner_for_batches(world: World) -> None:
    mine, other = await world.upload(lines(1)), await world.upload(lines(1), purpose="user_data")
    for owner, file_id in (("you", mine), ("me", "file-0"), ("me", other)):
        with pytest.raises(InvalidRequestError) as refusal:
            await world.service.create(owner, BatchOrder(input_file_id=file_id, endpoint=ENDPOINT))
        assert refusal.value.param == "input_file_id"


async def test_open_batches_of_an_owner_are_bounded_and_their_input_stays(world: World) -> None:
    world.handler = hang
    record = await world.create(1)
    order = BatchOrder(input_file_id=record.input_file_id, endpoint=ENDPOINT)
    for _ in range(MAX_OPEN - 1):
        await world.service.create("me", order)
    with pytest.raises(OverloadedError):
        await world.service.create("me", order)
    await world.restart()
    with pytest.raises(InvalidRequestError, match="input"):
        await (await world.service.files()).delete(record.input_file_id, "me")


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


async def hang(*_: object) -> LineResponse:
    await asyncio.Event().wait()
    raise AssertionError


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


async def test_an_input_that_is_gone_fails_its_batch(world: World) -> None:
    world.handler = hang
    record = await world.create(3)
    await world.until(record, lambda current: current.status == State.IN_PROGRESS)
    files = await world.service.files()
    files.path(await files.get(record.input_file_id, "me")).unlink()
    await world.restart()
    record = await world.end_of(record)
    assert [error["code"] for error in record.errors or ()] == ["input_file_missing"]


async def test_a_bug_fails_one_batch_and_the_next_goes_on(world: World) -> None:
    async def bug(_: str, body: dict[str, Any]) -> LineResponse:
        if body["number"] == 1:
            raise ZeroDivisionError
        return good(body["number"])

    world.handler = bug
    broken, whole = await world.create(3), await world.create(1)
    assert (await world.end_of(broken)).status == "failed"
    assert (await world.end_of(whole)).status == "completed"


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


def test_usage_is_counted_in_the_words_of_every_route() -> None:
    details = {"input_tokens_details": {"cached_tokens": 1}}
    messages = {"input_tokens": 1, "cache_read_input_tokens": 1, "output_tokens": 3}
    created = messages | {"input_tokens": 0, "cache_creation_input_tokens": 1}
    for usage in (USAGE, {"input_tokens": 2, "output_tokens": 3} | details, messages, created):
        counted = Usage()
        counted.add({"response": {"body": {"usage": usage}}})
        assert (counted.input_tokens, counted.cached_tokens, counted.output_tokens) == (2, 1, 3)
