"""The files of all writers as one of them changes them: under a lock, and within the limit."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from pathlib import Path

from mlx_parallm.generation.kv_cache.disk import folder as folders
from mlx_parallm.generation.kv_cache.disk.catalog import Catalog
from mlx_parallm.generation.kv_cache.disk.clocks import Clocks
from mlx_parallm.generation.kv_cache.disk.files import Files
from mlx_parallm.generation.kv_cache.disk.folder import ChangeCounter, WriterFolder
from mlx_parallm.generation.kv_cache.disk.runs import Run
from mlx_parallm.storage.disk import FOLDER_MODE


class SharedFolder:
    """The folder of ``--kv-disk``, with a writer's folder in it. One thread uses it.

    All methods raise OSError. ``on_seen`` is called with files that are new, and with those that
    are gone, whenever the folder was listed; ``on_evicted`` with a file that was evicted.
    """

    def __init__(
        self,
        path: Path,
        limit_bytes: int,
        files: Files,
        clocks: Clocks,
        on_seen: Callable[[list[Run], list[Run]], None],
        on_evicted: Callable[[Run], None],
    ) -> None:
        self.path = path
        self._limit_bytes = limit_bytes
        self._files = files
        self._timer = clocks.timer
        self._on_seen = on_seen
        self._on_evicted = on_evicted
        self._catalog = Catalog(path, files, clocks)
        self._own: WriterFolder | None = None
        # The counter of changes when the files were as the catalog has them.
        self._counter = -1
        self._device: int | None = None
        self._locked_since_ns: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all files; any thread may ask."""
        return self._catalog.num_bytes

    @property
    def own_bytes(self) -> int:
        """Bytes of this writer's files."""
        return self._catalog.sizes().get(self.own_name, 0)

    @property
    def own_name(self) -> str:
        """The name of this writer's folder; empty if there is none."""
        return "" if self._own is None else self._own.name

    def waiting_s(self) -> float:
        """Return how long the work under way has taken, in seconds; any thread may ask."""
        since = self._locked_since_ns
        return 0.0 if since is None else (self._timer() - since) / 1e9

    def scan(self) -> None:
        """See what others changed, and hold the limit."""
        if self._has_own():
            with self._locked():
                self._refresh(everything=False)
        if not self._has_own() or self.num_bytes > self._limit_bytes:
            with self.changing():
                self.make_room(0)

    @contextmanager
    def changing(self) -> Generator[None]:
        """Let the caller change files: know all of them, and have a writer's folder."""
        with self._locked() as counter:
            # Others look again even if this process is killed in the midst of its change.
            self._counter = counter.increase()
            if not self._has_own():
                self._refresh(everything=False)
                self._take_folder()
            yield

    def add(self, run: Run) -> None:
        """Count a file that was written."""
        self._catalog.add(run)

    def remove(self, run: Run) -> None:
        """Remove a file."""
        self._files.remove(run.path(self.path))
        self._catalog.remove(run)

    def forget(self, run: Run) -> None:
        """Count a file as gone."""
        self._catalog.remove(run)

    def forget_all(self) -> list[Run]:
        """Count all files as gone, and return them; a scan sees those that are there."""
        self._counter = -1
        return self._catalog.clear()

    def runs(self) -> list[Run]:
        """Return all files."""
        return self._catalog.runs()

    def make_room(self, needed: int, ancestors: Collection[Run] = ()) -> bool:
        """Evict until there is room for a file of this writer.

        Return False if there cannot be, or only in place of its ancestors: a chain that is larger
        than the limit keeps its beginning.
        """
        alive: set[str] | None = None
        while self.num_bytes + needed > self._limit_bytes:
            alive = self._alive() if alive is None else alive
            run = self._catalog.oldest(self._by_excess(alive, needed))
            if run is None or run in ancestors:
                return False
            self.remove(run)
            self._on_evicted(run)
        return True

    def close(self) -> None:
        """Give up the writer's folder."""
        if self._own is not None:
            self._own.close()
            self._own = None

    @contextmanager
    def _locked(self) -> Generator[ChangeCounter]:
        """Lock the folder, and know all files."""
        self._locked_since_ns = self._timer()
        try:
            self._check_device()
            with folders.locked(self.path) as counter:
                if (number := counter.read()) != self._counter:
                    self._refresh(everything=True)
                    self._counter = number
                yield counter
        finally:
            self._locked_since_ns = None

    def _refresh(self, *, everything: bool) -> None:
        self._on_seen(*self._catalog.refresh(everything=everything))

    def _check_device(self) -> None:
        """Raise OSError if another file system is where the folder was."""
        is_new = not self.path.exists()
        self.path.mkdir(mode=FOLDER_MODE, exist_ok=True)
        device = self._files.device(self.path)
        is_other = self._device is not None and device != self._device
        if is_other and not folders.is_ours(self.path):
            if is_new:
                self.path.rmdir()
            raise OSError(errno.ENODEV, "its file system is not mounted")
        self._device = device

    def _has_own(self) -> bool:
        return self._own is not None and self._own.is_there

    def _take_folder(self) -> None:
        """Take over the largest folder of a process that has ended, or make a new one.

        Empty folders of others that have ended are removed.
        """
        self.close()
        sizes = self._catalog.sizes()
        for name in sorted(sizes, key=lambda name: sizes[name], reverse=True):
            if self._own is not None and sizes[name]:
                continue
            if (ended := folders.take_over(self.path / name)) is None:
                continue
            if self._own is None:
                self._own = ended
            else:
                ended.remove()
        if self._own is None:
            self._own = folders.new_writer(self.path)
            self._catalog.add_writer(self._own.name)

    def _alive(self) -> set[str]:
        """Return the writers that live."""
        names = self._catalog.sizes()
        own = self.own_name
        return {name for name in names if name == own or folders.is_alive(self.path / name)}

    def _by_excess(self, alive: Collection[str], needed: int) -> list[str]:
        """Return the writers by their bytes above an equal share, the most first."""
        sizes = self._catalog.sizes()
        share = self._limit_bytes / max(1, len(alive))

        def excess(name: str) -> float:
            added = needed if name == self.own_name else 0
            return sizes[name] + added - (share if name in alive else 0)

        return sorted(sizes, key=excess, reverse=True)
