"""The engine thread's knowledge of the disk: where blocks are, and which ones wait to be written.

The lock is held for changes of dictionaries only, never while a file is read or written.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from mlx_parallm.generation.kv_cache.disk.clocks import Clocks
from mlx_parallm.generation.kv_cache.disk.format import CONTENT_BYTES
from mlx_parallm.generation.kv_cache.disk.runs import Run, WaitingRuns
from mlx_parallm.generation.kv_cache.stores import StoredBlock, latest

# WAITING_BYTES: most bytes that wait to be written; a disk that is slower loses blocks.
WAITING_BYTES = 256 << 20
# BUSY_SHARE: when such a part of it waits, the engine is asked to keep its blocks for a while.
BUSY_SHARE = 3 / 4
# MAX_UNREAD: a block that was dropped so many times without having been read is not written again.
MAX_UNREAD = 3
# MAX_COUNTED: most blocks whose drops are counted; each takes about 150 bytes.
MAX_COUNTED = 65_536


class BlockIndex:
    """Runs by the contents of their blocks. Any thread may call its methods.

    Attributes:
        counts: discarded blocks by reason: ``off`` (the folder does not work), ``slow`` (too much
            waits), ``full`` (only the chain's beginning has room), ``orphan`` (the block before it
            is not here), ``unread`` (it was dropped unread before), ``too_large`` (beyond the
            limit), ``damaged`` and ``unreadable`` (a file was).
        cleared_ns: when it was cleared last; files with older blocks are not to be added.
    """

    def __init__(self, clocks: Clocks, limit_bytes: int, largest_bytes: int = 0) -> None:
        """``largest_bytes``: the size of the largest block; while not busy, one more has room."""
        self._waiting_bytes = max(WAITING_BYTES, 2 * largest_bytes)
        busy_bytes = int(self._waiting_bytes * BUSY_SHARE)
        self._busy_bytes = min(busy_bytes, self._waiting_bytes - largest_bytes)
        self._clocks = clocks
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._runs: dict[bytes, Run] = {}
        self._waiting = WaitingRuns(limit_bytes)
        self._used: dict[Run, None] = {}
        self._unread: OrderedDict[bytes, int] = OrderedDict()
        self._stamp = 0
        self._off_until_ns = 0
        self.counts: Counter[str] = Counter()
        self.cleared_ns = 0

    def __len__(self) -> int:
        return len(self._runs)

    def find(self, contents: Sequence[bytes]) -> int:
        """Return how many leading contents are here, and count them as used."""
        runs = self._runs
        num = 0
        for content in contents:
            if content not in runs:
                break
            num += 1
        if num:
            self.use(contents[:num])
        return num

    def contents(self, most: float = math.inf) -> Sequence[bytes]:
        """Return the contents of blocks that are here, the latest used ones if there are more."""
        return latest({content: run.used_ns for content, run in [*self._runs.items()]}, most)

    def use(self, contents: Iterable[bytes]) -> None:
        """Count blocks of a chain as used, and those before them."""
        get, used, last = self._runs.get, list[Run](), None
        for content in contents:
            if (run := get(content)) is not None and run is not last:
                used.append(run)
                last = run
        with self._lock:
            self._use(used)

    def get(self, content: bytes) -> Run | None:
        """Return the run that has a block."""
        return self._runs.get(content)

    def has(self, content: bytes) -> bool:
        """True if a block is here, or would not be kept."""
        return (
            content in self._runs
            or self._unread.get(content, 0) >= MAX_UNREAD
            or (self._off_until_ns > 0 and self._clocks.timer() < self._off_until_ns)
        )

    def put(self, block: StoredBlock) -> bool:
        """Let a block wait to be written; return False if it is here or not kept."""
        if len(block.content) != CONTENT_BYTES:
            raise ValueError(f"a content has {CONTENT_BYTES} bytes, not {len(block.content)}")
        now = self._clocks.timer()
        with self._lock:
            if block.content in self._runs:
                return False
            if reason := self._reason_against(block, now):
                self.counts[reason] += 1
                return False
            parent = self._runs.get(block.parent)
            run = self._waiting.add(block, parent, self._clocks.wall(), now)
            self._runs[block.content] = run
            if run.blocks is not None and len(run.blocks) == 1:
                self._use([run])
            return True

    @property
    def is_busy(self) -> bool:
        """True while so much waits to be written that more may be discarded."""
        return self._waiting.num_bytes >= self._busy_bytes

    @property
    def room_bytes(self) -> int:
        """Bytes of blocks that may be put before some are discarded."""
        return max(0, self._waiting_bytes - self._waiting.num_bytes)

    def take_waiting(self, *, is_last: bool = False) -> Run | None:
        """Return the next run to write; ``is_last``: although more blocks could follow."""
        with self._lock:
            return self._waiting.take(None if is_last else self._clocks.timer())

    def next_due_ns(self) -> int | None:
        """Return when a run is to be written, by the timer; None if none waits."""
        with self._lock:
            return self._waiting.next_due_ns()

    def finish(self, run: Run, *, reason: str = "") -> None:
        """Count a run from ``take_waiting`` as written, or as discarded for a reason."""
        with self._lock:
            self._waiting.finish(run)
            if reason:
                self._discard(run, reason)

    def turn_off(self, until_ns: int) -> None:
        """Discard what waits, and keep nothing until a time of the timer."""
        with self._lock:
            self._off_until_ns = until_ns
            for run in self._waiting.drop_all():
                self._discard(run, "off")

    def turn_on(self) -> None:
        """Keep blocks again."""
        self._off_until_ns = 0

    def add(self, run: Run) -> bool:
        """Add the run of a file; return False if it has blocks of before the last ``clear``."""
        assert run.header is not None
        with self._lock:
            if run.header.put_ns <= self.cleared_ns:
                return False
            for content in run.header.contents():
                self._runs.setdefault(content, run)
            return True

    def drop(self, run: Run, *, reason: str = "") -> None:
        """Forget a run whose file is gone; ``reason``: count its blocks as discarded."""
        with self._lock:
            if reason:
                self._discard(run, reason)
            else:
                self._forget(run)

    def evicted(self, run: Run) -> None:
        """Forget a run that was evicted, and count that if it was not read."""
        with self._lock:
            for content in self._forget(run):
                if run.was_read:
                    self._unread.pop(content, None)
                else:
                    self._unread[content] = self._unread.pop(content, 0) + 1
            while len(self._unread) > MAX_COUNTED:
                self._unread.popitem(last=False)

    def clear(self) -> None:
        """Forget everything that was put before."""
        with self._lock:
            self.cleared_ns = self._clocks.wall()
            for _ in self._waiting.drop_all():
                pass
            self._runs = {}
            self._used = {}
            self._unread.clear()

    def take_used(self) -> list[Run]:
        """Return the runs that were used since the last call, those used last first."""
        with self._lock:
            used, self._used = self._used, {}
        return sorted(used, key=lambda run: run.used_ns, reverse=True)

    def ancestors(self, run: Run) -> list[Run]:
        """Return the runs before a run in its chain, the nearest first."""
        seen: dict[Run, None] = {run: None}
        while (parent := self._runs.get(run.parent)) is not None and parent not in seen:
            seen[parent] = None
            run = parent
        return list(seen)[1:]

    def _reason_against(self, block: StoredBlock, now_ns: int) -> str:
        if now_ns < self._off_until_ns:
            return "off"
        if self._unread.get(block.content, 0) >= MAX_UNREAD:
            return "unread"
        if block.parent and block.parent not in self._runs:
            return "orphan"
        if len(block.data) >= self._limit_bytes:
            return "too_large"
        waiting = self._waiting.num_bytes
        return "slow" if waiting and waiting + len(block.data) > self._waiting_bytes else ""

    def _use(self, runs: Sequence[Run]) -> None:
        """Stamp the runs of a chain such that each is newer than what follows it."""
        if not runs:
            return
        begin = stamp = max(self._stamp + 1, self._clocks.wall())
        for run in reversed(runs):
            run.used_ns = stamp
            self._used[run] = None
            stamp += 1
        parent = self._runs.get(runs[0].parent)
        # Runs that were stamped now end the walk, so it ends even if a chain leads back to itself.
        while parent is not None and parent.used_ns < begin:
            parent.used_ns = stamp
            self._used[parent] = None
            stamp += 1
            parent = self._runs.get(parent.parent)
        self._stamp = stamp

    def _discard(self, run: Run, reason: str) -> None:
        self.counts[reason] += len(self._forget(run))

    def _forget(self, run: Run) -> list[bytes]:
        """Forget a run; return the contents that were found in it, and not in another one."""
        self._used.pop(run, None)
        contents = [content for content in run.all_contents() if self._runs.get(content) is run]
        for content in contents:
            del self._runs[content]
        return contents
