"""Batches from beginning to end, and what is answered where they are refused or cut short."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mlx_parallm.batch_jobs.answers import LineResponse, Usage
from mlx_parallm.batch_jobs.records import State
from mlx_parallm.batch_jobs.service import BatchOrder
from mlx_parallm.batch_jobs.store import MAX_OPEN
from mlx_parallm.types.errors import InvalidRequestError, NotFoundError, OverloadedError
from tests.unit.batch_jobs.service.batch_world import (
    ENDPOINT,
    NUM_PLACES,
    USAGE,
    World,
    failing,
    good,
    hang,
    lines,
)


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


def test_usage_is_counted_in_the_words_of_every_route() -> None:
    details = {"input_tokens_details": {"cached_tokens": 1}}
    messages = {"input_tokens": 1, "cache_read_input_tokens": 1, "output_tokens": 3}
    created = messages | {"input_tokens": 0, "cache_creation_input_tokens": 1}
    for usage in (USAGE, {"input_tokens": 2, "output_tokens": 3} | details, messages, created):
        counted = Usage()
        counted.add({"response": {"body": {"usage": usage}}})
        assert (counted.input_tokens, counted.cached_tokens, counted.output_tokens) == (2, 1, 3)
