"""Lines are sent again to a server that fails, is busy, or loses its engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from mlx_parallm.batch_jobs.answers import LineResponse
from mlx_parallm.batch_jobs.run import MAX_LOST_TOGETHER, MAX_TRIES, growing_delay
from tests.unit.batch_jobs.service.batch_world import NUM_PLACES, World, failing, good


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
