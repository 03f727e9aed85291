from __future__ import annotations

import asyncio

import pytest
from hypothesis import given as examples
from hypothesis import strategies as st

from mlx_parallm.media.shared_budget import SharedBudget


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_pictures_wait_until_they_fit():
    budget = SharedBudget(10)
    await budget.acquire(6)
    second = asyncio.create_task(budget.acquire(5))
    await settle()
    assert not second.done()
    budget.release(6)
    await second
    assert budget.num_free == 5


async def test_a_small_picture_does_not_overtake_a_large_one():
    budget = SharedBudget(10)
    await budget.acquire(6)
    large = asyncio.create_task(budget.acquire(10))
    await settle()
    small = asyncio.create_task(budget.acquire(1))
    await settle()
    assert not small.done()
    budget.release(6)
    await large
    assert not small.done()
    budget.release(10)
    await small


async def test_a_large_picture_that_leaves_lets_smaller_ones_begin():
    budget = SharedBudget(10)
    await budget.acquire(6)
    large = asyncio.create_task(budget.acquire(10))
    await settle()
    small = asyncio.create_task(budget.acquire(4))
    await settle()
    large.cancel()
    await small
    assert budget.num_free == 0
    assert large.cancelled()


async def test_a_picture_that_leaves_at_its_turn_gives_its_room_back():
    budget = SharedBudget(10)
    await budget.acquire(10)
    waiting = asyncio.create_task(budget.acquire(10))
    await settle()
    budget.release(10)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert budget.num_free == 10


async def test_a_client_beyond_its_share_keeps_no_other_waiting():
    budget = SharedBudget(10)
    await budget.acquire(4, "greedy")
    second = asyncio.create_task(budget.acquire(2, "greedy"))
    third = asyncio.create_task(budget.acquire(1, "greedy"))
    await settle()
    await budget.acquire(3, "other")
    assert not second.done()
    assert not third.done(), "a client's pictures keep their order"
    budget.release(4, "greedy")
    await second
    await third
    assert budget.num_free == 4


async def test_a_picture_of_more_than_a_share_is_taken_alone():
    budget = SharedBudget(10)
    await budget.acquire(10, "one")
    assert budget.num_free == 0


@examples(
    clients=st.lists(st.sampled_from(["", "a", "b"]), min_size=20, max_size=20),
    sizes=st.lists(st.integers(1, 10), max_size=20),
    leaving=st.sets(st.integers(0, 19)),
    data=st.data(),
)
def test_no_room_is_lost_and_the_bound_holds(clients, sizes, leaving, data):
    async def run() -> None:
        budget, held = SharedBudget(10), 0
        highest = 0

        async def use(size: int, client: str) -> None:
            nonlocal held, highest
            await budget.acquire(size, client)
            held += size
            highest = max(highest, held)
            try:
                await asyncio.sleep(0)
            finally:
                held -= size
                budget.release(size, client)

        tasks = [asyncio.create_task(use(*each)) for each in zip(sizes, clients, strict=False)]
        for index in sorted(leaving & set(range(len(tasks)))):
            for _ in range(data.draw(st.integers(0, 3))):
                await asyncio.sleep(0)
            tasks[index].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert budget.num_free == 10
        assert highest <= 10

    asyncio.run(run())
