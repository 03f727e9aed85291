"""A store whose blocks are those of other servers."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from typing_extensions import override

from mlx_parallm.generation.kv_cache.peer.peers import PeerFetch, Peers
from mlx_parallm.generation.kv_cache.stores import BlockStore, Fetch, StoredBlock, StoreStats

logger = logging.getLogger(__name__)

# CLOSE_WITHIN_S: how long an end waits for the thread.
CLOSE_WITHIN_S = 2.0


class PeerStore(BlockStore):
    """Finds blocks by the filters of peers, and reads them on a thread of its own."""

    tier = "peer"
    is_own = False

    def __init__(self, peers: Peers, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start; ``close`` ends the links to the peers."""
        self._peers = peers
        self._close = close
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="kv-peers", daemon=True)
        self._thread.start()

    @override
    def find(self, contents: Sequence[bytes]) -> int:
        return self._peers.find(contents)[0]

    @override
    def fetch(self, contents: Sequence[bytes]) -> Fetch:
        fetch, (count, name) = PeerFetch(), self._peers.find(contents)
        if not count or self._loop.is_closed():
            fetch.is_done = True
            return fetch
        reading = self._peers.read(name, contents[:count], fetch)
        fetch.stop = asyncio.run_coroutine_threadsafe(reading, self._loop).cancel
        return fetch

    @override
    def put(self, block: StoredBlock) -> None:
        """Keep nothing: the peers compute for themselves."""

    @override
    def has(self, content: bytes) -> bool:
        return True

    @override
    def wake_by(self, wake: Callable[[], None]) -> None:
        self._peers.wake = wake

    @override
    def clear(self) -> None:
        self._peers.clear()

    @property
    @override
    def stats(self) -> StoreStats:
        peers = self._peers
        return StoreStats(
            num_blocks=peers.num_blocks,
            read_blocks=peers.num_read,
            read_bytes=peers.read_bytes,
            discarded=dict(peers.counts),
            off=peers.problem,
        )

    @override
    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_WITHIN_S)

    def _run(self) -> None:
        """Run the loop of the thread until ``close``."""
        asyncio.set_event_loop(self._loop)
        refreshing = self._loop.create_task(self._peers.keep_refreshing(asyncio.sleep))
        refreshing.add_done_callback(_log_failure)
        try:
            self._loop.run_forever()
        finally:
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            self._loop.run_until_complete(self._close())
            self._loop.close()


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (problem := task.exception()) is not None:
        logger.error("peers are not asked for KV any more", exc_info=problem)
