"""All files of all writers in the folder: their sizes, and which one is evicted next."""

from __future__ import annotations

import heapq
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mlx_parallm.generation.kv_cache.disk.clocks import Clocks
from mlx_parallm.generation.kv_cache.disk.files import PART, Files, FileState
from mlx_parallm.generation.kv_cache.disk.folder import is_writer
from mlx_parallm.generation.kv_cache.disk.format import SUFFIX
from mlx_parallm.generation.kv_cache.disk.runs import Run

# A file's name: owner, a random number, and the format, of this version or another.
_NAME = re.compile(r"([0-9a-f]+)-[0-9a-f]+\.(kv\d+)")
# MAX_GONE: files that are gone may be in the order of eviction, but not many more than the others.
MAX_GONE = 100


def file_name(owner: str, number: str) -> str:
    """Return the name of an owner's file; both are hexadecimal digits."""
    name = f"{owner}-{number}{SUFFIX}"
    assert owner_of(name) == owner, "the name is read as it was made"
    return name


def owner_of(name: str) -> str:
    """Return the owner that a file's name has; empty if it is no file of blocks."""
    match = _NAME.fullmatch(name)
    return match[1] if match else ""


def format_of(name: str) -> str:
    """Return the format that a file's name has, such as ``kv1``; empty if it has none."""
    match = _NAME.fullmatch(name)
    return match[2] if match else ""


@dataclass(slots=True)
class _Writer:
    """The files of a writer's folder, by name; the heap's order is that of eviction."""

    files: dict[str, Run] = field(default_factory=dict[str, Run])
    num_bytes: int = 0
    changed_ns: int = -1
    heap: list[tuple[int, int, Run]] = field(default_factory=list[tuple[int, int, Run]])


class Catalog:
    """The files of a folder. Only the store's own thread uses it.

    Attributes:
        num_bytes: bytes of all files.
    """

    def __init__(self, folder: Path, files: Files, clocks: Clocks) -> None:
        self._folder = folder
        self._files = files
        self._wall = clocks.wall
        self._writers: dict[str, _Writer] = {}
        self._numbers = itertools.count()
        self.num_bytes = 0

    def refresh(self, *, everything: bool) -> tuple[list[Run], list[Run]]:
        """List folders; return the files that are new, and those that are gone.

        Without ``everything``, only folders are listed whose time of change is another one. That
        is enough for what users do, but file systems count time in steps.

        Raises:
            OSError: the folder cannot be read.
        """
        names = {name for name in self._files.folders(self._folder) if is_writer(name)}
        added: list[Run] = []
        gone: list[Run] = []
        for name in self._writers.keys() - names:
            gone += self._forget_writer(name)
        for name in sorted(names):
            try:
                self._refresh_writer(name, added, gone, everything=everything)
            except FileNotFoundError:
                gone += self._forget_writer(name)
        return added, gone

    def add_writer(self, name: str) -> None:
        """Count a writer whose folder is new."""
        self._writers.setdefault(name, _Writer())

    def add(self, run: Run) -> None:
        """Count a file."""
        writer = self._writers.setdefault(run.writer, _Writer())
        writer.files[run.name] = run
        writer.num_bytes += run.file_bytes
        self.num_bytes += run.file_bytes
        heapq.heappush(writer.heap, (run.used_ns, next(self._numbers), run))
        if len(writer.heap) > MAX_GONE + 2 * len(writer.files):
            writer.heap = [entry for entry in writer.heap if self._has(writer, entry[2])]
            heapq.heapify(writer.heap)

    def remove(self, run: Run) -> None:
        """Count a file as gone."""
        writer = self._writers.get(run.writer)
        if writer is not None and self._has(writer, run):
            del writer.files[run.name]
            writer.num_bytes -= run.file_bytes
            self.num_bytes -= run.file_bytes

    def clear(self) -> list[Run]:
        """Forget all files, and return them."""
        return [run for name in list(self._writers) for run in self._forget_writer(name)]

    def runs(self) -> list[Run]:
        """Return all files."""
        return [run for writer in self._writers.values() for run in writer.files.values()]

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each writer."""
        return {name: writer.num_bytes for name, writer in self._writers.items()}

    def oldest(self, order: Iterable[str]) -> Run | None:
        """Return the least recently used file of the first of these writers that has files."""
        for name in order:
            if (run := self._oldest(self._writers[name])) is not None:
                return run
        return None

    def _oldest(self, writer: _Writer) -> Run | None:
        heap = writer.heap
        while heap:
            used_ns, number, run = heap[0]
            if not self._has(writer, run):
                heapq.heappop(heap)
                continue
            if run.used_ns <= used_ns and not self._see_use(run):
                continue
            if run.used_ns <= used_ns:
                return run
            heapq.heapreplace(heap, (run.used_ns, number, run))
        return None

    def _has(self, writer: _Writer, run: Run) -> bool:
        return writer.files.get(run.name) is run

    def _see_use(self, run: Run) -> bool:
        """Look whether another process used a file; return False if it is gone."""
        try:
            changed_ns = self._files.changed_ns(run.path(self._folder))
        except FileNotFoundError:
            self.remove(run)
            return False
        if changed_ns != run.saved_ns:
            run.saved_ns = changed_ns
            run.used_ns = max(run.used_ns, min(changed_ns, self._wall()))
            run.was_read = True
        return True

    def _refresh_writer(
        self, name: str, added: list[Run], gone: list[Run], *, everything: bool
    ) -> None:
        path = self._folder / name
        changed_ns = self._files.changed_ns(path)
        writer = self._writers.setdefault(name, _Writer())
        if changed_ns == writer.changed_ns and not everything:
            return
        states = {state.name: state for state in self._files.states(path)}
        for file in list(writer.files.values()):
            state = states.pop(file.name, None)
            if state is None or state.size != file.file_bytes:
                self.remove(file)
                gone.append(file)
                if state is not None:
                    states[file.name] = state
        for state in states.values():
            if owner_of(state.name) or state.name.endswith(PART):
                run = self._run(name, state)
                self.add(run)
                added.append(run)
        writer.changed_ns = changed_ns

    def _run(self, writer: str, state: FileState) -> Run:
        used_ns = min(state.changed_ns, self._wall())
        return Run(
            writer=writer,
            name=state.name,
            file_bytes=state.size,
            used_ns=used_ns,
            saved_ns=state.changed_ns,
        )

    def _forget_writer(self, name: str) -> list[Run]:
        writer = self._writers.pop(name, None)
        if writer is None:
            return []
        self.num_bytes -= writer.num_bytes
        return list(writer.files.values())
