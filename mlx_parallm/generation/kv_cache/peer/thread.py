"""The thread on which peers are asked."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from mlx_parallm.generation.kv_cache.peer.peers import PeerFetch

logger = logging.getLogger(__name__)

# CLOSE_WITHIN_S: how long an end waits for the thread.
CLOSE_WITHIN_S = 2.0

#: ``Close``: ends the links to peers.
Close = Callable[[], Coroutine[Any, Any, None]]


class PeerThread:
    """Runs an event loop until ``close``."""

    def __init__(self, close: Close, keep: Coroutine[Any, Any, None] | None = None) -> None:
        """Start; ``keep`` runs all the time."""
        self._close = close
        self._keep = keep
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kv-peers", daemon=True)
        self._thread.start()

    def read(self, reading: Coroutine[Any, Any, None], fetch: PeerFetch) -> PeerFetch:
        """Begin to read blocks; return the fetch that gets them."""
        if self._loop.is_closed():
            reading.close()
            fetch.is_done = True
        else:
            fetch.stop = asyncio.run_coroutine_threadsafe(reading, self._loop).cancel
        return fetch

    def close(self) -> None:
        """End what is being read, and the thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_WITHIN_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        if self._keep is not None:
            keeping = self._loop.create_task(self._keep)
            keeping.add_done_callback(_log_failure)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._end())
            self._loop.close()

    async def _end(self) -> None:
        """Cancel what runs; fetches are done then."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._close()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (problem := task.exception()) is not None:
        logger.error("peers are not asked for KV any more", exc_info=problem)
