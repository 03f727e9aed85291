"""The thread that changes files: it writes runs, evicts, and sees what other processes wrote."""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from mlx_parallm.generation.kv_cache.disk.catalog import file_name, owner_of
from mlx_parallm.generation.kv_cache.disk.clocks import Clocks
from mlx_parallm.generation.kv_cache.disk.digests import block_digests
from mlx_parallm.generation.kv_cache.disk.files import PART, Files, is_passing
from mlx_parallm.generation.kv_cache.disk.format import (
    FIXED_BYTES,
    SUFFIX,
    BadFileError,
    Header,
    header_size,
    pack_header,
    unpack_header,
)
from mlx_parallm.generation.kv_cache.disk.index import BlockIndex
from mlx_parallm.generation.kv_cache.disk.runs import Run
from mlx_parallm.generation.kv_cache.disk.shared_folder import SharedFolder

logger = logging.getLogger(__name__)

_SECOND = 1_000_000_000
# SCAN_NS: how often folders of other processes are looked at.
SCAN_NS = 2 * _SECOND
# SAVE_USES_NS: how often files get the time of their last use.
SAVE_USES_NS = 60 * _SECOND
# RETRY_NS: how long nothing is written after an error.
RETRY_NS = 30 * _SECOND
# LOG_NS: least time between two lines about damaged files.
LOG_NS = 60 * _SECOND
# MAX_HEADERS: most headers that are read before runs that wait are written.
MAX_HEADERS = 200


class Keeper:
    """Keeps the files of a folder. Its methods run on the store's own thread.

    Attributes:
        folder: the folder with the files of all writers.
        off: why nothing is written; empty if the folder works.
        written_blocks: blocks that were written so far.
        written_bytes: bytes of these.
    """

    def __init__(
        self,
        path: Path,
        owner: str,
        limit_bytes: int,
        index: BlockIndex,
        files: Files,
        clocks: Clocks,
        wake: Callable[[], None],
    ) -> None:
        """``wake`` is called when less waits to be written than made the store busy."""
        self.folder = SharedFolder(path, limit_bytes, files, clocks, self._see, index.evicted)
        self._path = path
        self._owner = owner
        self._index = index
        self._files = files
        self._timer = clocks.timer
        self._wake = wake
        # Files whose header is not read yet.
        self._new: deque[Run] = deque()
        # Files to remove, and why; empty if that is no fault.
        self._doomed: deque[tuple[Run, str]] = deque()
        # The time up to which clears have been carried out.
        self._cleared_ns = 0
        self._scan_failed = False
        self._next_scan_ns = 0
        self._next_save_ns = clocks.timer() + SAVE_USES_NS
        self._next_log_ns = 0
        self.off = ""
        self.written_blocks = 0
        self.written_bytes = 0

    @property
    def is_indexing(self) -> bool:
        """True while files are known whose headers are not read yet."""
        return bool(self._new)

    def doom(self, run: Run, why: str) -> None:
        """Let a damaged file be removed; any thread may call it."""
        self._doomed.append((run, why))

    def turn(self, *, is_last: bool = False) -> float:
        """Do what is due; return the seconds until more is.

        ``is_last`` writes all that waits, and saves all uses.
        """
        try:
            self._do_due(is_last=is_last)
        except OSError as problem:
            self._turn_off(problem.strerror or str(problem))
        except Exception as problem:
            # Its thread goes on: without it, what waits would never be written.
            logger.exception("the KV folder %s could not be kept", self._path)
            self._turn_off(f"{type(problem).__name__}: {problem}")
        else:
            if self._new:
                return 0.0
        due = min(self._next_scan_ns, self._next_save_ns)
        if (waiting := self._index.next_due_ns()) is not None:
            due = min(due, waiting)
        return max(0, due - self._timer()) / _SECOND

    def close(self) -> None:
        """Give up the writer's folder."""
        self.folder.close()

    def _do_due(self, *, is_last: bool) -> None:
        now = self._timer()
        if now >= self._next_scan_ns:
            self._next_scan_ns = now + SCAN_NS
            self._scan()
        if self._cleared_ns != self._index.cleared_ns:
            self._clear(self._index.cleared_ns)
        while (run := self._index.take_waiting(is_last=is_last)) is not None:
            self._write(run)
        for _ in range(min(MAX_HEADERS, len(self._new))):
            self._read_header(self._new.popleft())
        while self._doomed:
            self._remove_doomed(*self._doomed.popleft())
        if is_last or now >= self._next_save_ns:
            self._next_save_ns = now + SAVE_USES_NS
            self._save_uses()

    def _scan(self) -> None:
        """See what other processes changed; forget all files of a folder that cannot be read."""
        try:
            self.folder.scan()
        except OSError:
            self._scan_failed = True
            for run in self.folder.forget_all():
                self._index.drop(run)
            raise
        if self._scan_failed:
            self._scan_failed = False
            self._turn_on()

    def _see(self, added: list[Run], gone: list[Run]) -> None:
        # If no file of this writer is left, a user removed them.
        own = self.folder.own_name if self.folder.own_bytes else ""
        for run in gone:
            if run.writer == own:
                self._index.evicted(run)
            else:
                self._index.drop(run)
        # The files used last are the first to be found again.
        for run in sorted(added, key=lambda run: run.used_ns, reverse=True):
            if run.name.endswith(PART):
                self._doomed.append((run, ""))
            elif owner_of(run.name) == self._owner and run.name.endswith(SUFFIX):
                self._new.append(run)

    def _read_header(self, run: Run) -> None:
        try:
            with self._files.reading(run.path(self._path)) as file:
                size = header_size(file.read(0, FIXED_BYTES))
                run.header = unpack_header(file.read(0, size), self._owner, run.file_bytes)
        except FileNotFoundError:
            return
        except (OSError, BadFileError) as problem:
            if is_passing(problem):
                self._new.append(run)
                raise
            self._doomed.append((run, str(problem)))
            return
        if not self._index.add(run):
            self._doomed.append((run, ""))

    def _clear(self, cleared_ns: int) -> None:
        """Remove the files with blocks of before a clear, of all writers.

        Files whose headers are not read yet are removed when they are.
        """
        with self.folder.changing():
            for run in self.folder.runs():
                if run.header is not None and run.header.put_ns <= cleared_ns:
                    self.folder.remove(run)
                    self._index.drop(run)
        self._cleared_ns = cleared_ns

    def _write(self, run: Run) -> None:
        assert run.blocks is not None, "it waits to be written"
        try:
            packed, header = pack_header(
                self._owner, run.parent, run.put_ns, run.blocks, block_digests(run.blocks)
            )
            with self.folder.changing():
                reason = self._write_within_limit(run, packed, header)
        except Exception:
            with self._relieving():
                self._index.finish(run, reason="off")
            raise
        with self._relieving():
            self._index.finish(run, reason=reason)
        self._turn_on()

    @contextmanager
    def _relieving(self) -> Generator[None]:
        """Wake the engine if the store is busy before the block and not after it."""
        was_busy = self._index.is_busy
        yield
        if was_busy and not self._index.is_busy:
            self._wake()

    def _write_within_limit(self, run: Run, packed: bytes, header: Header) -> str:
        """Write a run; return why it was discarded instead, or an empty text."""
        ancestors = self._index.ancestors(run)
        if run.parent and not ancestors:
            return "orphan"
        if not self.folder.make_room(header.file_bytes, ancestors):
            return "full"
        self._write_file(run, packed, header)
        # On the disk too, no file is older than what follows it.
        for ancestor in reversed(ancestors):
            if ancestor.header is not None and ancestor.saved_ns < run.saved_ns:
                self._touch(ancestor)
        return ""

    def _write_file(self, run: Run, packed: bytes, header: Header) -> None:
        assert run.blocks is not None, "it waits to be written"
        run.writer = self.folder.own_name
        run.name = file_name(self._owner, secrets.token_hex(8))
        used_ns = run.used_ns
        self._files.write(run.path(self._path), [packed, *run.blocks.values()], used_ns)
        self.written_blocks += len(run.blocks)
        self.written_bytes += run.data_bytes
        run.saved_ns, run.file_bytes = used_ns, header.file_bytes
        self.folder.add(run)
        # Readers look for the blocks first, and then for the header.
        run.header, run.blocks = header, None

    def _remove_doomed(self, run: Run, why: str) -> None:
        now = self._timer()
        if why and now >= self._next_log_ns:
            self._next_log_ns = now + LOG_NS
            logger.warning("the KV file %s is removed: %s", run.path(self._path), why)
        with self.folder.changing():
            try:
                self.folder.remove(run)
            except (IsADirectoryError, PermissionError):
                # A user put something else there, which stays.
                self.folder.forget(run)

    def _touch(self, run: Run) -> None:
        used_ns = run.used_ns
        try:
            self._files.touch(run.path(self._path), used_ns)
        except FileNotFoundError:
            return
        run.saved_ns = used_ns

    def _save_uses(self) -> None:
        for run in self._index.take_used():
            if run.header is not None and run.saved_ns < run.used_ns:
                self._touch(run)

    def _turn_off(self, why: str) -> None:
        if why != self.off:
            logger.warning("no KV is written to %s: %s", self._path, why)
        self.off = why
        with self._relieving():
            self._index.turn_off(self._timer() + RETRY_NS)

    def _turn_on(self) -> None:
        if self.off:
            logger.warning("KV is written to %s again", self._path)
            self.off = ""
            self._index.turn_on()
