"""Memory is given back after large bodies, and not while more of them are answered."""

from __future__ import annotations

import asyncio
import threading

from mlx_parallm.api.http.body_budget import LARGE_BYTES, FreedMemory
from mlx_parallm.machine import trim_heap

WAIT_S = 60.0


class Trims:
    """Counts calls; one that is waited for has come."""

    def __init__(self) -> None:
        self.count = 0
        self._come = threading.Semaphore(0)

    def __call__(self) -> None:
        self.count += 1
        self._come.release()

    async def wait(self) -> None:
        assert await asyncio.to_thread(self._come.acquire, timeout=WAIT_S)


def test_memory_is_given_back_after_a_large_body() -> None:
    async def main() -> None:
        trims = Trims()
        FreedMemory(trims, pause_s=0).note(LARGE_BYTES, 0)
        await trims.wait()

    asyncio.run(main())


def test_nothing_is_given_back_after_small_bodies_and_beside_large_ones() -> None:
    async def main() -> None:
        trims = Trims()
        freed = FreedMemory(trims, pause_s=0)
        freed.note(LARGE_BYTES - 1, 0)
        freed.note(LARGE_BYTES, LARGE_BYTES)
        # What was due would begin in the next round of the loop.
        for _ in range(3):
            await asyncio.sleep(0)
        assert trims.count == 0
        freed.note(1, 0)
        await trims.wait()
        assert trims.count == 1

    asyncio.run(main())


def test_bodies_that_follow_each_other_are_followed_by_one_trim() -> None:
    async def main() -> None:
        trims = Trims()
        freed = FreedMemory(trims, pause_s=0)
        for _ in range(8):
            freed.note(LARGE_BYTES, 0)
        await trims.wait()
        for _ in range(3):
            await asyncio.sleep(0)
        assert trims.count == 1

    asyncio.run(main())


def test_trimming_leaves_the_process_as_it_is() -> None:
    trim_heap()
