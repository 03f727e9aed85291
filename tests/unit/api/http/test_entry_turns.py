"""Bursts of one client let the others through."""

import asyncio
import contextlib

from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.fairness import EntryTurns


async def enter(turns: EntryTurns, client: str, entered: list[tuple[int, str]], rounds: list[int]):
    await turns.take(client)
    entered.append((rounds[0], client))


async def count(rounds: list[int]) -> None:
    while True:
        rounds[0] += 1
        await asyncio.sleep(0)


async def run(arrivals: list[str]) -> list[tuple[int, str]]:
    """Who entered in which round of the event loop, when all arrive together."""
    turns, entered, rounds = EntryTurns(), [], [0]
    counter = asyncio.ensure_future(count(rounds))
    await asyncio.gather(*(enter(turns, client, entered, rounds) for client in arrivals))
    counter.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await counter
    return entered


@given(st.lists(st.sampled_from("abc"), max_size=30))
def test_each_client_enters_once_in_a_round_and_nobody_is_lost(arrivals: list[str]) -> None:
    entered = asyncio.run(run(arrivals))
    assert sorted(client for _, client in entered) == sorted(arrivals)
    assert len(set(entered)) == len(entered)


def test_who_comes_alone_does_not_wait_behind_a_burst() -> None:
    entered = asyncio.run(run(["hostile"] * 100 + ["normal"]))
    assert [client for _, client in entered[:2]] == ["hostile", "normal"]
    assert entered[0][0] == entered[1][0]


async def test_who_leaves_the_line_costs_no_turn() -> None:
    turns, entered, rounds = EntryTurns(), [], [0]
    tasks = [asyncio.ensure_future(enter(turns, "a", entered, rounds)) for _ in range(5)]
    await asyncio.sleep(0)
    for task in tasks[1:4]:
        task.cancel()
    await asyncio.wait(tasks)
    assert len(entered) == 2
    # Nothing is left: the next one enters at once.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    entering = asyncio.ensure_future(turns.take("a"))
    await asyncio.sleep(0)
    assert entering.done()
