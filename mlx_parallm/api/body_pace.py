"""How fast a client's bodies are read while others are here."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# To read and check a megabyte of JSON holds the event loop for 10 ms: one client may have a tenth
# of it.
BYTES_PER_S = 8 * 1024 * 1024
# What may come at once: more than the largest conversations have.
BURST_BYTES = 1024 * 1024


class BodyPace:
    """Lets a client's bodies through at a bounded rate, unless it is the only client here.

    A body that is being read holds the event loop, and everybody's tokens pass through that. A
    client whose bodies come faster waits for their sake, and nobody else does.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._here: Counter[str] = Counter()
        # By client: when what came so far is through, at that rate.
        self._through_s: dict[str, float] = {}

    @contextmanager
    def present(self, client: str) -> Iterator[None]:
        """A request of this client is in the server."""
        self._here[client] += 1
        try:
            yield
        finally:
            self._here[client] -= 1
            if not self._here[client]:
                del self._here[client]
                if self._through_s.get(client, 0.0) <= self._clock():
                    self._through_s.pop(client, None)

    def delay(self, client: str, size: int) -> float:
        """For how many seconds to hold back ``size`` bytes of a body that have come."""
        if len(self._here) < 2:
            return 0.0
        now_s = self._clock()
        through_s = max(self._through_s.get(client, 0.0), now_s) + size / BYTES_PER_S
        self._through_s[client] = through_s
        return max(0.0, through_s - now_s - BURST_BYTES / BYTES_PER_S)

    async def wait(self, client: str, size: int) -> None:
        """Hold back ``size`` bytes of a body that have come."""
        delay_s = self.delay(client, size)
        if delay_s:
            await asyncio.sleep(delay_s)
