"""Requests of one event wake the event loop once, and that event may be a refusal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.engine.control import PauseMode
from mlx_parallm.engine.core import EngineCore
from mlx_parallm.types.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    RequestLostError,
)
from tests.engine_action import Do
from tests.sum_kind import MAX_NUMBER, SumClient, SumRequest, sum_core


@pytest.fixture
async def core(tmp_path: Path) -> AsyncIterator[EngineCore]:
    core = sum_core(tmp_path / "sum", "a")
    core.start()
    yield core
    core.stop()


def add(request_id: str, *numbers: int) -> SumRequest:
    return SumRequest(request_id=request_id, model="a", numbers=numbers)


async def test_the_loop_is_woken_once(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    client, loop, calls = SumClient(core), asyncio.get_running_loop(), list[Any]()
    wake = loop.call_soon_threadsafe

    def counted(callback: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(callback)
        return wake(callback, *arguments, **options)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    for number in range(5):
        assert await client.add(str(number), "a", number, 1) == number + 1
    assert len(calls) == 5, "once a request"
    with pytest.raises(OverloadedError):
        await client.add("x", "a", MAX_NUMBER + 1)
    assert len(calls) == 6, "a refusal is an event"


async def test_a_refusal_is_the_event_and_leaves_nothing(core: EngineCore) -> None:
    reader = await core.open_reader(add("x", MAX_NUMBER + 1))
    with pytest.raises(OverloadedError, match="too much"):
        await reader.results()
    assert reader.is_complete
    await core.wait_until_idle()
    assert core.open_requests() == []
    assert await SumClient(core).add("x", "a", 1, 2) == 3


async def test_what_the_event_loop_refuses_is_raised_at_once(core: EngineCore) -> None:
    with pytest.raises(InvalidRequestError, match="nothing to add"):
        await core.open_reader(add("x"))
    await core.wait_until_idle()


async def test_a_late_refusal_is_not_of_a_later_request(core: EngineCore) -> None:
    first = await core.open_reader(add("x", MAX_NUMBER + 1))
    # The loop has not turned since, so the refusal comes after both of these.
    await core.abort("x")
    later = await core.open_reader(add("x", 1, 2))
    assert await later.results() == 3
    assert not first.is_complete


async def test_a_cancelled_caller_leaves_nothing(core: EngineCore) -> None:
    await core.control.pause(PauseMode.KEEP)
    reader = await core.open_reader(add("x", 1))
    waiting = asyncio.create_task(reader.results())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await core.abort("x")
    await core.wait_until_idle()
    assert await core.control.pause(PauseMode.KEEP) == 0


async def test_a_death_ends_requests_whose_admission_nobody_saw(core: EngineCore) -> None:
    await core.control.pause(PauseMode.KEEP)
    readers = [await core.open_reader(add(str(number), 1)) for number in range(3)]

    def die(_: Any) -> None:
        raise SystemExit

    with pytest.raises(EngineDeadError):
        await core.call(Do(die))
    for reader in readers:
        with pytest.raises(RequestLostError):
            await reader.results()
    await core.wait_until_idle()
    with pytest.raises(EngineDeadError):
        await core.open_reader(add("after", 1))


async def test_a_drain_ends_requests_that_do_not_finish(core: EngineCore) -> None:
    await core.control.pause(PauseMode.KEEP)
    reader = await core.open_reader(add("x", 1))
    await core.control.resume()
    await core.drain(60)
    assert await reader.results() == 1
