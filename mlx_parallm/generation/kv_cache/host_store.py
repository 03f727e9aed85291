"""A store in host memory, for a device that has memory of its own."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from typing_extensions import override

from mlx_parallm.generation.kv_cache.stores import BlockStore, StoredBlock, StoreStats, latest
from mlx_parallm.types.content import Buffer


@dataclass(slots=True)
class _Entry:
    """A block that is here, the time of its last use, and how many blocks here follow it."""

    block: StoredBlock
    used: int
    num_children: int = 0


@dataclass(frozen=True, slots=True)
class _Held:
    """Blocks that need no reading; implements ``Fetch``."""

    blocks: Sequence[Buffer]
    is_done: bool = True

    def result(self) -> Sequence[Buffer]:
        return self.blocks

    def cancel(self) -> None:
        """Do nothing: nothing is being read."""


class HostStore(BlockStore):
    """Keeps blocks whose data take up to ``limit_bytes``.

    Beyond it, the least recently used block that no other one follows is evicted. So the beginning
    of a chain outlives the rest, also of a chain that is larger than the limit.
    """

    tier = "host"

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._entries: dict[bytes, _Entry] = {}
        # A heap of (time, content) that has each block without children, by its last use or an
        # earlier one. Others may be there too, and blocks that are gone.
        self._candidates: list[tuple[int, bytes]] = []
        self._now = 0
        self._used_bytes = self._read_blocks = self._read_bytes = 0
        self._written_blocks = self._written_bytes = 0
        self._discarded = Counter[str]()

    @override
    def find(self, contents: Sequence[bytes]) -> int:
        count = len(list(takewhile(self.has, contents)))
        self.use(contents[:count])
        return count

    @override
    def use(self, contents: Sequence[bytes]) -> None:
        self._now += 1
        for entry in filter(None, map(self._entries.get, contents)):
            entry.used = self._now

    @override
    def fetch(self, contents: Sequence[bytes]) -> _Held:
        blocks = [self._entries[each].block.data for each in takewhile(self.has, contents)]
        self._read_blocks += len(blocks)
        self._read_bytes += sum(map(len, blocks))
        return _Held(blocks)

    @override
    def put(self, block: StoredBlock) -> None:
        if self.has(block.content):
            return
        parent = self._entries.get(block.parent)
        if len(block.data) > self._limit_bytes:
            self._discarded["too_large"] += 1
            return
        if block.parent and parent is None:
            self._discarded["orphan"] += 1
            return
        if parent is not None:
            parent.num_children += 1
        self._now += 1
        self._entries[block.content] = _Entry(block, self._now)
        heapq.heappush(self._candidates, (self._now, block.content))
        self._used_bytes += len(block.data)
        self._written_blocks += 1
        self._written_bytes += len(block.data)
        while self._used_bytes > self._limit_bytes:
            self._check_candidate(*heapq.heappop(self._candidates))

    def _check_candidate(self, time: int, content: bytes) -> None:
        """Evict a block; if it was used after ``time``, make it a candidate again instead."""
        entry = self._entries.get(content)
        if entry is None or entry.num_children:
            return
        if entry.used > time:
            heapq.heappush(self._candidates, (entry.used, content))
            return
        del self._entries[content]
        self._used_bytes -= len(entry.block.data)
        parent = self._entries.get(entry.block.parent)
        if parent is not None:
            parent.num_children -= 1
            heapq.heappush(self._candidates, (parent.used, entry.block.parent))

    @override
    def has(self, content: bytes) -> bool:
        return content in self._entries

    @override
    def contents(self, most: float = math.inf) -> Sequence[bytes]:
        return latest({content: each.used for content, each in [*self._entries.items()]}, most)

    @override
    def clear(self) -> None:
        self._entries.clear()
        self._candidates.clear()
        self._used_bytes = 0

    @property
    @override
    def stats(self) -> StoreStats:
        return StoreStats(
            num_blocks=len(self._entries),
            used_bytes=self._used_bytes,
            limit_bytes=self._limit_bytes,
            read_blocks=self._read_blocks,
            read_bytes=self._read_bytes,
            written_blocks=self._written_blocks,
            written_bytes=self._written_bytes,
            discarded=dict(self._discarded),
        )
