"""The pace at which a client's bodies are read while other clients are here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mlx_parallm.api.http.client_pace import ClientPace

# BYTES_PER_S: reading and checking a megabyte of JSON holds the event loop for 10 ms; a client may
# use a tenth of the loop's time.
BYTES_PER_S = 8 * 1024 * 1024
# BURST_BYTES: bytes that may come at once, more than the largest conversations have.
BURST_BYTES = 1024 * 1024


class BodyPace(ClientPace):
    """Lets a client's bodies through at a bounded rate, unless it is the only client here.

    A body that is being read holds the event loop, and everybody's tokens pass through that. A
    client whose bodies come faster waits, and nobody else does.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock, rate=BYTES_PER_S, burst=BURST_BYTES)

    async def wait(self, client: str, size: int) -> None:
        """Hold back ``size`` bytes of a body that have come."""
        delay_s = self.delay(client, size)
        if delay_s:
            await asyncio.sleep(delay_s)
