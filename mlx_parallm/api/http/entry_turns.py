"""Lets clients in by turns, so that one client's burst of requests does not delay the others."""

from __future__ import annotations

import asyncio
from collections import deque


class EntryTurns:
    """One request of each client enters per round of the event loop.

    Parsing, checking and encoding a request holds the event loop for a millisecond or more. A
    hundred that come together would hold it for their whole time; so they enter one after another,
    and the work of other clients runs in between.
    """

    def __init__(self) -> None:
        # The requests that enter in the next rounds, of each client that entered in this one.
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}

    async def take(self, client: str) -> None:
        """Wait for a turn; a client's first request of a round does not wait."""
        loop = asyncio.get_running_loop()
        if not self._lines:
            loop.call_soon(self._next_round)
        line = self._lines.get(client)
        if line is None:
            self._lines[client] = deque()
            return
        turn: asyncio.Future[None] = loop.create_future()
        line.append(turn)
        await turn

    def _next_round(self) -> None:
        for client, line in list(self._lines.items()):
            # Cancelled requests have no turn.
            while line and line[0].done():
                line.popleft()
            if line:
                line.popleft().set_result(None)
            else:
                del self._lines[client]
        if self._lines:
            asyncio.get_running_loop().call_soon(self._next_round)
