"""The thread that changes files: it writes runs, evicts, and sees what other processes wrote."""

from __future__ import annotations

import errno
import logging
import secrets
from collections import deque
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from pathlib import Path

from mlx_parallm.generation.kv_cache.disk import folder as folders
from mlx_parallm.generation.kv_cache.disk.catalog import Catalog, file_name
from mlx_parallm.generation.kv_cache.disk.clocks import Clocks
from mlx_parallm.generation.kv_cache.disk.files import PART, Files, is_passing
from mlx_parallm.generation.kv_cache.disk.folder import ChangeCounter, WriterFolder
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


class Keeper:
    """Keeps the files of a folder. All methods but ``doom`` run on the store's own thread.

    Attributes:
        off: why nothing is written; empty if the folder works.
        written_blocks: blocks that were written so far.
        written_bytes: bytes of these.
        num_bytes: bytes of all files in the folder.
    """

    def __init__(
        self,
        folder: Path,
        owner: str,
        limit_bytes: int,
        index: BlockIndex,
        files: Files,
        clocks: Clocks,
        wake: Callable[[], None],
    ) -> None:
        """``wake`` is called when less waits to be written than made the store busy."""
        self._folder = folder
        self._wake = wake
        self._owner = owner
        self._limit_bytes = limit_bytes
        self._index = index
        self._files = files
        self._timer = clocks.timer
        self._catalog = Catalog(folder, files, clocks)
        self._own: WriterFolder | None = None
        self._counter = -1
        self._device: int | None = None
        self._doomed: deque[tuple[Run, str]] = deque()
        self._new: deque[Run] = deque()
        self._clear_is_due = False
        self._scan_failed = False
        self._next_scan_ns = 0
        self._next_save_ns = clocks.timer() + SAVE_USES_NS
        self._next_log_ns = 0
        self._locked_since_ns: int | None = None
        self.off = ""
        self.written_blocks = 0
        self.written_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all files in the folder."""
        return self._catalog.num_bytes

    def waiting_s(self) -> float:
        """Return how many seconds the work with files has taken that is under way."""
        since = self._locked_since_ns
        return 0.0 if since is None else (self._timer() - since) / _SECOND

    def doom(self, run: Run, why: str) -> None:
        """Let a damaged file be removed; any thread may call it."""
        self._doomed.append((run, why))

    def clear(self) -> None:
        """Let all files of the owner be removed; any thread may call it."""
        self._clear_is_due = True

    def turn(self, *, is_last: bool = False) -> float:
        """Do what is due; return the seconds until more is.

        ``is_last`` writes all that waits, and saves all uses.
        """
        try:
            self._do_due(is_last=is_last)
        except OSError as problem:
            self._turn_off(problem)
        now = self._timer()
        due = min(self._next_scan_ns, self._next_save_ns)
        if (waiting := self._index.next_due_ns()) is not None:
            due = min(due, waiting)
        return max(0, due - now) / _SECOND

    def close(self) -> None:
        """Give up the writer's folder."""
        if self._own is not None:
            self._own.close()
            self._own = None

    def _do_due(self, *, is_last: bool) -> None:
        now = self._timer()
        if now >= self._next_scan_ns:
            self._next_scan_ns = now + SCAN_NS
            self._scan()
        if self._clear_is_due:
            self._clear_is_due = False
            self._remove_all()
        while (run := self._index.take_waiting(is_last=is_last)) is not None:
            self._write(run)
        while self._new:
            self._read_header(self._new.popleft())
        while self._doomed:
            self._remove_bad(*self._doomed.popleft())
        if is_last or now >= self._next_save_ns:
            self._next_save_ns = now + SAVE_USES_NS
            self._save_uses()

    @contextmanager
    def _locked(self) -> Generator[ChangeCounter]:
        """Lock the folder, and know all its files."""
        self._locked_since_ns = self._timer()
        try:
            self._check_device()
            with folders.locked(self._folder) as counter:
                if (number := counter.read()) != self._counter:
                    self._see(*self._catalog.refresh(everything=True))
                    self._counter = number
                yield counter
        finally:
            self._locked_since_ns = None

    @contextmanager
    def _changing(self) -> Generator[WriterFolder]:
        """Lock the folder for a change, and give this writer's folder."""
        with self._locked() as counter:
            # Others look again even if this process is killed in the midst of its change.
            self._counter = counter.increase()
            if self._own is None or not self._own.is_there:
                self._see(*self._catalog.refresh(everything=False))
                self._own = self._take_folder()
            yield self._own

    def _check_device(self) -> None:
        """Raise OSError if another file system is where the folder was."""
        is_new = not self._folder.exists()
        self._folder.mkdir(mode=folders.FOLDER_MODE, exist_ok=True)
        device = self._files.device(self._folder)
        if (
            self._device is not None
            and device != self._device
            and not folders.is_ours(self._folder)
        ):
            if is_new:
                self._folder.rmdir()
            raise OSError(errno.ENODEV, "its file system is not mounted")
        self._device = device

    def _take_folder(self) -> WriterFolder:
        """Take over the largest folder of a process that has ended, or make a new one.

        Empty folders of others that have ended are removed.
        """
        if self._own is not None:
            self._own.close()
        own: WriterFolder | None = None
        sizes = self._catalog.sizes()
        for name in sorted(sizes, key=lambda name: sizes[name], reverse=True):
            if own is not None and sizes[name]:
                continue
            if (ended := folders.take_over(self._folder / name)) is None:
                continue
            if own is None:
                own = ended
            else:
                ended.remove()
        own = own or folders.new_writer(self._folder)
        self._catalog.add_writer(own.name)
        return own

    def _remove_all(self) -> None:
        """Remove the files of the owner with blocks of before the last clear, of all writers.

        Files whose headers are not read yet are removed when they are.
        """
        with self._changing():
            for run in self._catalog.runs():
                if run.header is not None and run.header.put_ns <= self._index.cleared_ns:
                    self._remove(run)
                    self._index.drop(run)

    def _scan(self) -> None:
        """See what other processes wrote and removed, and hold the limit."""
        try:
            if self._own is None or not self._own.is_there:
                with self._changing():
                    pass
            else:
                with self._locked():
                    self._see(*self._catalog.refresh(everything=False))
        except OSError:
            self._scan_failed = True
            for run in self._catalog.clear():
                self._index.drop(run)
            raise
        if self._scan_failed:
            self._scan_failed = False
            self._turn_on()
        if self._catalog.num_bytes > self._limit_bytes:
            with self._changing():
                self._make_room(0)

    def _see(self, added: list[Run], gone: list[Run]) -> None:
        own = self._own.name if self._own is not None else ""
        # If all files of this writer are gone, a user removed them.
        is_eviction = bool(self._catalog.sizes().get(own))
        for run in gone:
            if is_eviction and run.writer == own:
                self._index.evicted(run)
            else:
                self._index.drop(run)
        # The files used last are the first to be found again.
        for run in sorted(added, key=lambda run: run.used_ns, reverse=True):
            if run.name.endswith(PART):
                self._doomed.append((run, ""))
            elif run.name.startswith(f"{self._owner}-") and run.name.endswith(SUFFIX):
                self._new.append(run)

    def _read_header(self, run: Run) -> None:
        try:
            with self._files.reading(run.path(self._folder)) as file:
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

    def _write(self, run: Run) -> None:
        assert run.blocks is not None
        try:
            packed, header = pack_header(self._owner, run.parent, run.put_ns, run.blocks)
            with self._changing() as own:
                ancestors = self._index.ancestors(run)
                if run.parent and not ancestors:
                    reason = "orphan"
                elif not self._make_room(header.file_bytes, own.name, ancestors):
                    reason = "full"
                else:
                    reason = ""
                    self._write_file(run, packed, header, own)
                    self._touch_older(ancestors, run.saved_ns)
        except OSError:
            self._index.finish(run, reason="off")
            raise
        was_busy = self._index.is_busy
        self._index.finish(run, reason=reason)
        self._turn_on()
        if was_busy and not self._index.is_busy:
            self._wake()

    def _write_file(self, run: Run, packed: bytes, header: Header, own: WriterFolder) -> None:
        assert run.blocks is not None
        run.writer, run.name = own.name, file_name(self._owner, secrets.token_hex(8))
        used_ns = run.used_ns
        self._files.write(run.path(self._folder), [packed, *run.blocks.values()], used_ns)
        self.written_blocks += len(run.blocks)
        self.written_bytes += run.data_bytes
        run.saved_ns, run.file_bytes = used_ns, header.file_bytes
        self._catalog.add(run)
        run.header, run.blocks = header, None

    def _touch_older(self, ancestors: list[Run], used_ns: int) -> None:
        """Let files that are older than what follows them be newer, on the disk too."""
        for run in reversed(ancestors):
            if run.header is not None and run.saved_ns < used_ns:
                self._touch(run)

    def _make_room(self, needed: int, writer: str = "", ancestors: Collection[Run] = ()) -> bool:
        """Evict until there is room for a file of a writer.

        Return False if there cannot be, or only in place of its ancestors: a chain that is larger
        than the limit keeps its beginning.
        """
        alive: set[str] | None = None
        while self._catalog.num_bytes + needed > self._limit_bytes:
            alive = self._alive() if alive is None else alive
            run = self._catalog.oldest(self._by_excess(alive, needed, writer))
            if run is None or run in ancestors:
                return False
            self._remove(run)
            self._index.evicted(run)
        return True

    def _alive(self) -> set[str]:
        """Return the writers that live."""
        own = self._own.name if self._own is not None else ""
        names = self._catalog.sizes()
        return {name for name in names if name == own or folders.is_alive(self._folder / name)}

    def _by_excess(self, alive: set[str], needed: int, writer: str) -> list[str]:
        """Return the writers by their bytes above an equal share, the most first."""
        sizes = self._catalog.sizes()
        share = self._limit_bytes / max(1, len(alive))

        def excess(name: str) -> float:
            added = needed if name == writer else 0
            return sizes[name] + added - (share if name in alive else 0)

        return sorted(sizes, key=excess, reverse=True)

    def _remove(self, run: Run) -> None:
        self._files.remove(run.path(self._folder))
        self._catalog.remove(run)

    def _remove_bad(self, run: Run, why: str) -> None:
        now = self._timer()
        if why and now >= self._next_log_ns:
            self._next_log_ns = now + LOG_NS
            logger.warning("the KV file %s is removed: %s", run.path(self._folder), why)
        with self._changing():
            try:
                self._remove(run)
            except (IsADirectoryError, PermissionError):
                # A user put something else there, which stays.
                self._catalog.remove(run)

    def _touch(self, run: Run) -> None:
        used_ns = run.used_ns
        try:
            self._files.touch(run.path(self._folder), used_ns)
        except FileNotFoundError:
            return
        run.saved_ns = used_ns

    def _save_uses(self) -> None:
        for run in self._index.take_used():
            if run.header is not None and run.saved_ns < run.used_ns:
                self._touch(run)

    def _turn_off(self, problem: OSError) -> None:
        why = problem.strerror or str(problem)
        if not self.off:
            logger.warning("no KV is written to %s: %s", self._folder, why)
        self.off = why
        self._index.turn_off(self._timer() + RETRY_NS)

    def _turn_on(self) -> None:
        if self.off:
            logger.warning("KV is written to %s again", self._folder)
            self.off = ""
            self._index.turn_on()
