"""Admission of several prompts of one HTTP request: together, and all or none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from mlx_parallm.api.turns import generation
from mlx_parallm.api.turns.generation import Generation, unless_disconnected
from mlx_parallm.generation.model import RequestHandle
from mlx_parallm.types.errors import InvalidRequestError, OverloadedError
from mlx_parallm.types.request import GenerateRequest
from tests.fake_engine import FakeEngine, write

REQUESTS = [GenerateRequest(request_id=str(i), model="alias", prompt_ids=(i,)) for i in range(3)]


class SlowEngine(FakeEngine):
    """Answers no submission before it has seen all; refuses the ids in ``refusals``."""

    def __init__(self, refusals: dict[str, Exception] | None = None) -> None:
        super().__init__()
        self._refusals = refusals or {}
        self._all_here = asyncio.Event()

    async def submit(self, request: GenerateRequest) -> RequestHandle:
        handle = await super().submit(request)
        if self.submitted.qsize() == len(REQUESTS):
            self._all_here.set()
        await self._all_here.wait()
        if request.request_id in self._refusals:
            raise self._refusals[request.request_id]
        return handle


def aborted(engine: FakeEngine) -> set[str]:
    return {engine.aborted.get_nowait() for _ in range(engine.aborted.qsize())}


async def test_prompts_are_submitted_together_and_in_order() -> None:
    engine = SlowEngine()
    generation = await Generation.start(engine, REQUESTS, fields={})
    assert [engine.submitted.get_nowait().request_id for _ in REQUESTS] == ["0", "1", "2"]
    numbers = {number async for number, _ in generation.events()}
    assert numbers == {0, 1, 2}
    assert aborted(engine) == set()


async def test_a_refusal_takes_back_only_what_was_admitted() -> None:
    engine = SlowEngine({"1": OverloadedError("full")})
    with pytest.raises(OverloadedError):
        await Generation.start(engine, REQUESTS, fields={})
    assert "1" not in aborted(engine)


async def test_a_refusal_is_told_in_the_words_of_the_body() -> None:
    engine = SlowEngine({"2": InvalidRequestError("no", param="max_tokens")})
    fields = {"max_tokens": "max_completion_tokens"}
    with pytest.raises(InvalidRequestError) as refusal:
        await Generation.start(engine, REQUESTS, fields=fields)
    assert refusal.value.param == "max_completion_tokens"


async def test_a_cancelled_admission_takes_back_what_was_admitted() -> None:
    is_last_here = asyncio.Event()

    class HalfSlow(FakeEngine):
        async def submit(self, request: GenerateRequest) -> RequestHandle:
            handle = await super().submit(request)
            if request.request_id == "2":
                is_last_here.set()
                await asyncio.Event().wait()
            return handle

    engine = HalfSlow()
    start = asyncio.ensure_future(Generation.start(engine, REQUESTS, fields={}))
    await is_last_here.wait()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert aborted(engine) == {"0", "1"}


async def test_nothing_waits_for_the_reader_of_an_aborted_generation() -> None:
    engine = FakeEngine()
    engine.script = write("x" * 1000)
    before = asyncio.all_tasks()
    generation = await Generation.start(engine, REQUESTS, fields={})
    await generation.wait_for_first(0)
    async for _ in generation.events():
        break
    await generation.abort()
    left = asyncio.all_tasks() - before
    await asyncio.sleep(0)
    assert [task for task in left if "_pump" in repr(task) and not task.done()] == []
    assert aborted(engine) == {"0", "1", "2"}


async def test_a_client_that_leaves_as_its_answer_is_ready_cancels_nothing_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generation, "WATCH_AFTER_S", 0.0)
    loop = asyncio.get_running_loop()
    watched = asyncio.Event()
    left: asyncio.Future[Any] = loop.create_future()
    done: asyncio.Future[str] = loop.create_future()

    async def receive() -> Any:
        watched.set()
        return await left

    async def work() -> str:
        return await done

    async def answer() -> Any:
        request = Request({"type": "http", "headers": []}, receive)
        result = await unless_disconnected(request, work())
        for _ in range(5):
            await asyncio.sleep(0)
        return result

    caller = asyncio.ensure_future(answer())
    await watched.wait()
    left.set_result({"type": "http.disconnect"})
    done.set_result("answer")
    assert await caller == "answer"
    assert caller.cancelling() == 0
