"""KV blocks in files of a folder: written behind the engine, found again after a restart."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from mlx_parallm.generation.kv_cache.disk.clocks import Clocks
from mlx_parallm.generation.kv_cache.disk.files import Files, is_passing
from mlx_parallm.generation.kv_cache.disk.format import BadFileError
from mlx_parallm.generation.kv_cache.disk.index import BlockIndex
from mlx_parallm.generation.kv_cache.disk.keeper import Keeper
from mlx_parallm.generation.kv_cache.disk.reader import Readers
from mlx_parallm.generation.kv_cache.disk.runs import Run
from mlx_parallm.generation.kv_cache.stores import BlockStore, Fetch, StoredBlock, StoreStats

# START_WITHIN_S: how long a start waits for the files to be found; what is found later, is found
# later.
START_WITHIN_S = 2.0
# CLOSE_WITHIN_S: how long an end waits for what is still to be written.
CLOSE_WITHIN_S = 5.0
# FLUSH_POLL_S: how often ``flush`` looks whether the store has ended meanwhile.
FLUSH_POLL_S = 1.0
# SLOW_S: a disk that has not answered for so long is not asked for blocks.
SLOW_S = 5.0


@dataclass(slots=True)
class _Reads:
    """Blocks that were read so far, and their bytes."""

    blocks: int = 0
    num_bytes: int = 0


class DiskStore(BlockStore):
    """Blocks of one model in a folder that it shares with other models and processes."""

    tier = "disk"

    def __init__(
        self,
        folder: Path,
        owner: str,
        limit_bytes: int,
        *,
        largest_bytes: int = 0,
        files: Files | None = None,
        clocks: Clocks | None = None,
        has_threads: bool = True,
    ) -> None:
        """Open the folder.

        Args:
            folder: folder of ``--kv-disk``, which ``check_kv_folder`` has accepted.
            owner: digest of all that decides the bytes of blocks, in hexadecimal digits.
            limit_bytes: most bytes of all files in the folder.
            largest_bytes: the size of the largest block.
            files: calls to the operating system.
            clocks: what the time is.
            has_threads: False: nothing happens but in ``turn``.
        """
        self._limit_bytes = limit_bytes
        self._files = files or Files()
        clocks = clocks or Clocks()
        self._index = BlockIndex(clocks, limit_bytes, largest_bytes)
        self._keeper = Keeper(
            folder, owner, limit_bytes, self._index, self._files, clocks, self._on_progress
        )
        self._readers = Readers(
            folder, self._files, self._on_bad, self._on_read, self._on_progress, clocks
        )
        self._reads = _Reads()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._wake_engine: Callable[[], None] = _nothing
        self._flushes: list[threading.Event] = []
        self._is_closed = False
        self._thread: threading.Thread | None = None
        if has_threads:
            self._start()

    @override
    def find(self, contents: Sequence[bytes]) -> int:
        return 0 if self._readers.waiting_s() > SLOW_S else self._index.find(contents)

    @override
    def use(self, contents: Sequence[bytes]) -> None:
        self._index.use(contents)

    @override
    def fetch(self, contents: Sequence[bytes]) -> Fetch:
        runs: list[tuple[Run, bytes]] = []
        for content in contents:
            if (run := self._index.get(content)) is None:
                break
            runs.append((run, content))
        return self._readers.fetch(runs)

    @override
    def put(self, block: StoredBlock) -> None:
        if not self._is_closed and self._index.put(block):
            self._wake.set()

    @property
    @override
    def is_busy(self) -> bool:
        return self._index.is_busy

    @property
    @override
    def room_bytes(self) -> float:
        return self._index.room_bytes

    @override
    def wake_by(self, wake: Callable[[], None]) -> None:
        self._wake_engine = wake

    @override
    def has(self, content: bytes) -> bool:
        return self._index.has(content)

    @override
    def contents(self, most: float = math.inf) -> Sequence[bytes]:
        return self._index.contents(most)

    @override
    def clear(self) -> None:
        self._index.clear()
        self._wake.set()

    @property
    @override
    def stats(self) -> StoreStats:
        return StoreStats(
            num_blocks=len(self._index),
            used_bytes=self._keeper.folder.num_bytes,
            limit_bytes=self._limit_bytes,
            read_blocks=self._reads.blocks,
            read_bytes=self._reads.num_bytes,
            written_blocks=self._keeper.written_blocks,
            written_bytes=self._keeper.written_bytes,
            discarded=dict(self._index.counts),
            off=self._keeper.off or self._slow(),
        )

    @override
    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._wake.set()
        if self._thread is not None:
            deadline = time.monotonic() + CLOSE_WITHIN_S
            self._thread.join(CLOSE_WITHIN_S)
            self._readers.close(max(0.0, deadline - time.monotonic()))
        else:
            self._keeper.turn(is_last=True)
            self._keeper.close()

    def flush(self) -> None:
        """Return when what waits is written, or discarded."""
        if self._thread is None:
            self._keeper.turn(is_last=True)
            return
        is_flushed = threading.Event()
        with self._lock:
            self._flushes.append(is_flushed)
        self._wake.set()
        while not is_flushed.wait(FLUSH_POLL_S) and self._thread.is_alive():
            pass

    def turn(self) -> None:
        """Do what is due on the caller's thread, in a store without threads."""
        self._keeper.turn()
        while self._keeper.is_indexing and not self._keeper.off:
            self._keeper.turn()
        self._readers.read_waiting()

    def _slow(self) -> str:
        """Return a sentence if the disk does not answer, else an empty text."""
        waiting_s = max(self._readers.waiting_s(), self._keeper.folder.waiting_s())
        return f"the disk has not answered for {waiting_s:.0f} s" if waiting_s > SLOW_S else ""

    def _start(self) -> None:
        is_ready = threading.Event()
        self._readers.start()
        self._thread = threading.Thread(
            target=self._keep, args=[is_ready], name="kv-disk-keeper", daemon=True
        )
        self._thread.start()
        is_ready.wait(START_WITHIN_S)

    def _keep(self, is_ready: threading.Event) -> None:
        delay_s = 0.0
        while not self._is_closed:
            self._wake.wait(delay_s)
            self._wake.clear()
            with self._lock:
                flushes, self._flushes = self._flushes, []
            delay_s = self._keeper.turn(is_last=bool(flushes))
            for is_flushed in flushes:
                is_flushed.set()
            if not self._keeper.is_indexing:
                is_ready.set()
        self._keeper.turn(is_last=True)
        self._keeper.close()

    def _on_progress(self) -> None:
        self._wake_engine()

    def _on_bad(self, run: Run, problem: Exception) -> None:
        if is_passing(problem):
            return
        if isinstance(problem, FileNotFoundError):
            # Another process evicted it.
            self._index.drop(run)
            return
        reason = "damaged" if isinstance(problem, BadFileError) else "unreadable"
        self._index.drop(run, reason=reason)
        self._keeper.doom(run, str(problem))
        self._wake.set()

    def _on_read(self, run: Run, num_blocks: int, num_bytes: int) -> None:
        run.was_read = True
        with self._lock:
            self._reads.blocks += num_blocks
            self._reads.num_bytes += num_bytes


def _nothing() -> None:
    """Wake no engine: there is none yet."""
