"""The order of loads: clients take turns, and who goes away holds none."""

from __future__ import annotations

import asyncio

from mlx_parallm.engine.load_turns import MAX_CLIENTS, LoadTurns
from tests.virtual_time import in_virtual_time


async def load(turns: LoadTurns, client: str, order: list[str], name: str) -> None:
    async with turns.turn(client):
        order.append(name)
        await asyncio.sleep(1)


@in_virtual_time
async def test_one_client_waits_in_order() -> None:
    turns, order = LoadTurns(), list[str]()
    await asyncio.gather(*(load(turns, "x", order, str(number)) for number in range(5)))
    assert order == list("01234")


@in_virtual_time
async def test_a_client_with_many_loads_takes_turns_with_others() -> None:
    turns, order = LoadTurns(), list[str]()
    greedy = [load(turns, "greedy", order, f"g{number}") for number in range(4)]
    others = [load(turns, name, order, name) for name in ("x", "y")]
    await asyncio.gather(*greedy, *others)
    assert order == ["g0", "x", "y", "g1", "g2", "g3"]


@in_virtual_time
async def test_who_goes_away_passes_its_turn_on() -> None:
    turns, order = LoadTurns(), list[str]()
    first = asyncio.ensure_future(load(turns, "a", order, "a"))
    second = asyncio.ensure_future(load(turns, "b", order, "b"))
    third = asyncio.ensure_future(load(turns, "c", order, "c"))
    await asyncio.sleep(0.5)
    second.cancel()
    await asyncio.gather(first, second, third, return_exceptions=True)
    assert order == ["a", "c"]
    # It is free again.
    await load(turns, "d", order, "d")


@in_virtual_time
async def test_who_is_cancelled_just_when_its_turn_comes_passes_it_on() -> None:
    turns, order = LoadTurns(), list[str]()

    async def first() -> None:
        async with turns.turn("a"):
            await asyncio.sleep(1)
        # The second has the turn by now, and has not run.
        second.cancel()

    leaving = asyncio.ensure_future(first())
    await asyncio.sleep(0)
    second = asyncio.ensure_future(load(turns, "b", order, "b"))
    third = asyncio.ensure_future(load(turns, "c", order, "c"))
    await asyncio.gather(leaving, second, third, return_exceptions=True)
    assert order == ["c"]


@in_virtual_time
async def test_a_failing_block_ends_its_turn() -> None:
    turns, order = LoadTurns(), list[str]()

    async def fail() -> None:
        async with turns.turn("a"):
            raise ValueError("it fails")

    await asyncio.gather(fail(), load(turns, "b", order, "b"), return_exceptions=True)
    assert order == ["b"]


@in_virtual_time
async def test_few_clients_are_remembered() -> None:
    turns = LoadTurns()
    for number in range(MAX_CLIENTS + 10):
        async with turns.turn(str(number)):
            pass
    assert len(turns._turns) == MAX_CLIENTS
