"""The order of loads: one at a time, and every client gets its turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import count

# MAX_CLIENTS: clients whose earlier turns are remembered.
MAX_CLIENTS = 1024


class LoadTurns:
    """A lock whose next owner is the client that had it the longest time ago.

    A client that names one model after the other so waits behind those that have had no turn since,
    however many loads it asks for. It belongs to the event loop.
    """

    def __init__(self) -> None:
        self._is_taken = False
        self._clock = count(1)
        self._order = count()
        # The latest turn of each client.
        self._turns: dict[str, int] = {}
        self._waiting: list[tuple[str, int, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def turn(self, client: str = "") -> AsyncGenerator[None]:
        """Wait for a turn, which lasts as long as the block."""
        if self._is_taken:
            await self._wait(client)
        self._is_taken = True
        self._note(client)
        try:
            yield
        finally:
            self._is_taken = False
            self._next()

    async def _wait(self, client: str) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((client, next(self._order), future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                # The turn was given to it, and nobody else would get it.
                self._is_taken = False
                self._next()
            raise

    def _next(self) -> None:
        self._waiting = [each for each in self._waiting if not each[2].done()]
        if self._waiting and not self._is_taken:
            first = min(self._waiting, key=lambda each: (self._turns.get(each[0], 0), each[1]))
            self._is_taken = True
            first[2].set_result(None)

    def _note(self, client: str) -> None:
        self._turns.pop(client, None)
        self._turns[client] = next(self._clock)
        if len(self._turns) > MAX_CLIENTS:
            del self._turns[next(iter(self._turns))]
