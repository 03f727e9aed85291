"""Places for samples: never too many, first come first served, none lost."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.batch_jobs.slots import Slots

NUM_PLACES = 4


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@given(
    wanted=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    cancelled=st.sets(st.integers(0, 11)),
    order=st.randoms(use_true_random=False),
)
def test_places_are_given_in_order_and_all_come_back(
    wanted: list[int], cancelled: set[int], order: object
) -> None:
    async def run() -> None:
        slots = Slots(NUM_PLACES)
        begun: list[int] = []
        ends = [asyncio.Event() for _ in wanted]
        held = 0

        async def hold(number: int) -> None:
            nonlocal held
            await slots.take(wanted[number])
            begun.append(number)
            held += min(wanted[number], NUM_PLACES)
            assert held <= NUM_PLACES
            await ends[number].wait()
            held -= min(wanted[number], NUM_PLACES)
            slots.give_back(wanted[number])

        tasks = [asyncio.ensure_future(hold(number)) for number in range(len(wanted))]
        await settle()
        for number in cancelled & set(range(len(wanted))) - set(begun):
            tasks[number].cancel()
        while not all(task.done() for task in tasks):
            await settle()
            open_ones = [number for number in begun if not ends[number].is_set()]
            if open_ones:
                ends[order.choice(open_ones)].set()  # type: ignore[attr-defined]
        assert begun == sorted(begun)
        await slots.take(NUM_PLACES)

    asyncio.run(run())


async def test_who_is_cancelled_in_its_turn_gives_its_places_on() -> None:
    slots = Slots(1)
    await slots.take(1)
    first, second = (asyncio.ensure_future(slots.take(1)) for _ in range(2))
    await settle()
    slots.give_back(1)
    first.cancel()
    await second
    assert first.cancelled()
