"""A bound on the decoded pixels that the process holds."""

from __future__ import annotations

import asyncio
from collections import deque


class PixelBudget:
    """Lets pictures be decoded while their pixels fit, in the order of their arrival.

    A task must not wait for a second picture while it holds a first: two such tasks could wait
    for each other. The methods are called on one event loop.
    """

    def __init__(self, num_pixels: int) -> None:
        """``num_pixels`` is the sum over all pictures in use."""
        self._num_free = num_pixels
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def num_free(self) -> int:
        """Pixels that no picture uses."""
        return self._num_free

    async def acquire(self, num_pixels: int) -> None:
        """Wait until there is room for a picture, and for those that came before it."""
        if not self._waiting and num_pixels <= self._num_free:
            self._num_free -= num_pixels
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_pixels, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.release(num_pixels)
            else:
                # A large picture that leaves may have kept smaller ones waiting.
                self._begin()
            raise

    def release(self, num_pixels: int) -> None:
        """Give back what a picture used."""
        self._num_free += num_pixels
        self._begin()

    def _begin(self) -> None:
        """Let those begin that fit, in order."""
        while self._waiting:
            num_pixels, turn = self._waiting[0]
            if not turn.done():
                if num_pixels > self._num_free:
                    return
                self._num_free -= num_pixels
                turn.set_result(None)
            self._waiting.popleft()
