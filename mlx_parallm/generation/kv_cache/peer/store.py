"""A store whose blocks are those of other servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from typing_extensions import override

from mlx_parallm.generation.kv_cache.peer.peers import PeerFetch, Peers
from mlx_parallm.generation.kv_cache.peer.thread import Close, PeerThread
from mlx_parallm.generation.kv_cache.stores import BlockStore, Fetch, StoredBlock, StoreStats


class PeerStore(BlockStore):
    """Finds blocks by the filters of peers, and reads them on a thread of its own."""

    tier = "peer"
    is_own = False
    gives_parts = True
    is_steady = True

    def __init__(self, peers: Peers, close: Close) -> None:
        """Start; ``close`` ends the links to the peers."""
        self._peers = peers
        self._thread = PeerThread(close, peers.keep_refreshing(asyncio.sleep))

    @override
    def find(self, contents: Sequence[bytes]) -> int:
        return self._peers.find(contents)[0]

    @override
    def fetch(self, contents: Sequence[bytes]) -> Fetch:
        fetch, (count, name) = PeerFetch(), self._peers.find(contents)
        fetch.is_done = not count
        if count:
            self._thread.read(self._peers.read(name, contents[:count], fetch), fetch)
        return fetch

    @override
    def place(self, contents: Sequence[bytes]) -> str:
        return f"{self.tier} {self._peers.find(contents)[1]}"

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
        self._thread.close()
