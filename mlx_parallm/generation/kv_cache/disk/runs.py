"""Runs of blocks: what a file of the disk store has, before and after it is written."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlx_parallm.generation.kv_cache.disk.format import Header
from mlx_parallm.generation.kv_cache.stores import StoredBlock
from mlx_parallm.types.content import Buffer

# RUN_BYTES, RUNS: a run that has so many bytes, or this part of the folder's limit, is written.
# Files of this size are read at a disk's full rate, and lose little if one is evicted as a whole.
RUN_BYTES = 8 << 20
RUNS = 8
# IDLE_NS, AGE_NS: a run is written so long after its last, or its first block.
IDLE_NS = 500_000_000
AGE_NS = 1_500_000_000


@dataclass(slots=True, eq=False)
class Run:
    """Consecutive blocks of one chain: in memory until they are written, then a file.

    Attributes:
        parent: content of the block before the first one; empty if there is none.
        put_ns: when the first block was put, in ns since 1970.
        begun_ns: the same by the timer.
        last: content of the last block, while they are in memory.
        last_ns: when the last block was put, by the timer.
        blocks: bytes of the blocks by their contents, in order; None once they are a file.
        data_bytes: bytes of the blocks, while they are in memory.
        file_bytes: bytes of the file.
        writer: name of the folder of the file.
        name: name of the file.
        header: the file's header; None for files of other owners and formats.
        used_ns: when it was last used, in ns since 1970, as far as this process knows.
        saved_ns: the same as the file's time of change has it.
        was_read: True if a block was read since it was written.
    """

    parent: bytes = b""
    put_ns: int = 0
    begun_ns: int = 0
    last: bytes = b""
    last_ns: int = 0
    blocks: dict[bytes, Buffer] | None = None
    data_bytes: int = 0
    file_bytes: int = 0
    writer: str = ""
    name: str = ""
    header: Header | None = None
    used_ns: int = 0
    saved_ns: int = 0
    was_read: bool = False

    def all_contents(self) -> list[bytes]:
        """Return the contents of its blocks, in order."""
        if self.header is not None:
            return self.header.contents()
        return list(self.blocks or ())

    def path(self, folder: Path) -> Path:
        """Return where its file is below the store's folder."""
        return folder / self.writer / self.name

    def due_ns(self) -> int:
        """Return when it is to be written although it is not full, by the timer."""
        return min(self.last_ns + IDLE_NS, self.begun_ns + AGE_NS)


class WaitingRuns:
    """Runs that are not written yet: open ones still get blocks, full ones do not.

    Attributes:
        num_bytes: bytes of all their blocks.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._run_bytes = min(RUN_BYTES, limit_bytes // RUNS)
        # Open runs by the content of their last block.
        self._open: dict[bytes, Run] = {}
        self._full: deque[Run] = deque()
        self.num_bytes = 0

    def add(self, block: StoredBlock, follows: Run | None, put_ns: int, now_ns: int) -> Run:
        """Append a block to the run that its parent ends, or to a new one; return the run.

        A state is a run of its own: it is as large as many blocks, and may be evicted before them.
        ``follows`` is the run that has the parent; ``put_ns`` is the time since 1970, and
        ``now_ns`` that of the timer.
        """
        continues = block.parent and not block.is_state
        run = self._open.pop(block.parent, None) if continues else None
        if run is None:
            # The beginning of a chain is written before what follows it.
            if follows is not None and follows.last in self._open:
                self._full.append(self._open.pop(follows.last))
            run = Run(parent=block.parent, put_ns=put_ns, begun_ns=now_ns, blocks={})
        assert run.blocks is not None, "an open run is in memory"
        run.blocks[block.content] = block.data
        run.last, run.last_ns = block.content, now_ns
        run.data_bytes += len(block.data)
        self.num_bytes += len(block.data)
        if block.is_state or run.data_bytes >= self._run_bytes:
            self._full.append(run)
        else:
            self._open[block.content] = run
        return run

    def take(self, now_ns: int | None = None) -> Run | None:
        """Return the next run to write, if one is full or due; without a time, any."""
        for last, run in list(self._open.items()):
            if now_ns is None or run.due_ns() <= now_ns:
                self._full.append(self._open.pop(last))
        return self._full.popleft() if self._full else None

    def next_due_ns(self) -> int | None:
        """Return when ``take`` returns a run; None if there is none."""
        if self._full:
            return 0
        return min((run.due_ns() for run in self._open.values()), default=None)

    def finish(self, run: Run) -> None:
        """Count a run that ``take`` returned as written or dropped."""
        self.num_bytes -= run.data_bytes

    def drop_all(self) -> Iterator[Run]:
        """Drop the runs that ``take`` has not returned, and yield them."""
        while (run := self.take()) is not None:
            self.finish(run)
            yield run
