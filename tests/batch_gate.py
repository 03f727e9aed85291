"""A script of an engine that lets lines of batches wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

from mlx_parallm.types.events import GenerateEvent
from mlx_parallm.types.request import GenerateRequest
from tests.fake_engine import write

POLL_S = 0.01
INT64 = 2**63


class Gate:
    """A script that answers clients at once, and lines of batches when its gate is open."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    async def script(self, request: GenerateRequest) -> AsyncIterator[GenerateEvent]:
        # The test opens it from another thread; waiting in a thread would outlive an abort.
        while request.priority >= INT64 and not self._open.is_set():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        async for event in write("hello")(request):
            yield event
