"""A fair semaphore that bounds the number of samples in the engine."""

from __future__ import annotations

import asyncio
from collections import deque


class Slots:
    """A semaphore whose holders take several places at once.

    Places are granted in order of request, so that a request for many is not starved. A request for
    more places than exist takes all of them.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._num_free = num_places
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, num_wanted: int) -> None:
        """Wait for places; ``give_back`` the same number when done."""
        num_wanted = min(num_wanted, self._num_places)
        if not self._waiting and num_wanted <= self._num_free:
            self._num_free -= num_wanted
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_wanted, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._wake()
            else:  # the places were granted just before the cancellation
                self.give_back(num_wanted)
            raise

    def give_back(self, num_wanted: int) -> None:
        """Return places that ``take`` granted."""
        self._num_free += min(num_wanted, self._num_places)
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            num_wanted, turn = self._waiting[0]
            if not turn.done():
                if num_wanted > self._num_free:
                    return
                self._num_free -= num_wanted
                turn.set_result(None)
            self._waiting.popleft()
