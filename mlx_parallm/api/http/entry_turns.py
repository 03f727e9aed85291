"""Lets clients in by turns, so that a burst of one's requests does not hold up the others."""

from __future__ import annotations

import asyncio
from collections import deque


class EntryTurns:
    """One request of each client enters per round of the event loop.

    To parse, check and encode a request holds the event loop for a millisecond or more. A hundred
    that come together would hold it for as long as they all take; so they enter one after another,
    and what others wait for runs in between.
    """

    def __init__(self) -> None:
        # Of each client that entered in this round: what enters in the next ones.
        self._lines: dict[str, deque[asyncio.Future[None]]] = {}

    async def take(self, client: str) -> None:
        """Wait for a turn; the first of a round need not."""
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
            # Those that were cancelled have no turn.
            while line and line[0].done():
                line.popleft()
            if line:
                line.popleft().set_result(None)
            else:
                del self._lines[client]
        if self._lines:
            asyncio.get_running_loop().call_soon(self._next_round)
