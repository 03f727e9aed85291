"""A disk store without threads, with a clock of its own and files that can fail."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from typing_extensions import override

from mlx_parallm.generation.kv_cache.disk.clocks import Clocks
from mlx_parallm.generation.kv_cache.disk.files import Files, FileState, OpenFile
from mlx_parallm.generation.kv_cache.disk.folder import locked
from mlx_parallm.generation.kv_cache.disk.store import DiskStore
from mlx_parallm.generation.kv_cache.stores import StoredBlock
from mlx_parallm.types.content import Buffer

OWNER = "ab" * 32
MIB = 1 << 20
SECOND = 1_000_000_000


@dataclass
class Clock:
    """Time in ns since 1970, which passes when a test says so."""

    now_ns: int = 1_700_000_000 * SECOND

    def __call__(self) -> int:
        return self.now_ns

    def pass_s(self, seconds: float) -> None:
        self.now_ns += int(seconds * SECOND)


@dataclass
class FaultyFiles(Files):
    """Files whose calls raise an error, or do something before."""

    errors: dict[str, int] = field(default_factory=dict)
    before: dict[str, Callable[[], object]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)

    def _call(self, name: str) -> None:
        self.calls[name] += 1
        if name in self.before:
            self.before[name]()
        if name in self.errors:
            raise OSError(self.errors[name], os.strerror(self.errors[name]))

    @override
    def folders(self, folder: Path) -> list[str]:
        self._call("list")
        return super().folders(folder)

    @override
    def states(self, folder: Path) -> list[FileState]:
        self._call("list")
        return super().states(folder)

    @override
    def device(self, path: Path) -> int:
        self._call("device")
        return super().device(path)

    @override
    @contextmanager
    def reading(self, path: Path) -> Generator[OpenFile]:
        self._call("read")
        with super().reading(path) as file:
            yield file

    @override
    def write_parts(self, descriptor: int, parts: Iterable[Buffer]) -> None:
        if "write" in self.errors:
            os.write(descriptor, b"half a file")
        self._call("write")
        super().write_parts(descriptor, parts)

    @override
    def touch(self, path: Path, used_ns: int) -> None:
        self._call("touch")
        super().touch(path, used_ns)

    @override
    def remove(self, path: Path) -> None:
        self._call("remove")
        super().remove(path)


def chain(
    name: object, num_blocks: int, size: int = 1000, parent: bytes = b""
) -> list[StoredBlock]:
    """Return the blocks of a chain; equal names give equal blocks."""
    blocks: list[StoredBlock] = []
    for number in range(num_blocks):
        content = hashlib.sha256(repr((name, number, parent)).encode()).digest()
        data = (content * (size // 32 + 1))[:size]
        blocks.append(StoredBlock(content=content, parent=parent, data=data))
        parent = content
    return blocks


def contents(blocks: Sequence[StoredBlock]) -> list[bytes]:
    return [block.content for block in blocks]


@dataclass
class Disk:
    """A folder and the stores that were opened in it."""

    folder: Path
    clock: Clock = field(default_factory=Clock)
    stores: list[DiskStore] = field(default_factory=list)

    def open(
        self,
        limit_bytes: int = 100 * MIB,
        owner: str = OWNER,
        files: Files | None = None,
        largest_bytes: int = 0,
    ) -> DiskStore:
        self.folder.mkdir(exist_ok=True)
        store = DiskStore(
            self.folder,
            owner,
            limit_bytes,
            largest_bytes=largest_bytes,
            files=files,
            clocks=Clocks(self.clock, self.clock),
            has_threads=False,
        )
        self.stores.append(store)
        store.turn()
        return store

    def kill(self, store: DiskStore) -> None:
        """End a store as SIGKILL does: its locks are free, and what waits is lost."""
        store._keeper.close()

    def save(self, store: DiskStore, blocks: Sequence[StoredBlock]) -> None:
        """Put blocks, and let time pass until they are files."""
        for block in blocks:
            store.put(block)
        self.clock.pass_s(3)
        store.turn()

    def count_change(self) -> None:
        """Increase the counter of changes, as every process does before it changes files."""
        with locked(self.folder) as counter:
            counter.increase()

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*/*") if path.name != "lock")

    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files())


def read(store: DiskStore, wanted: Sequence[bytes]) -> list[bytes]:
    """Return the blocks that a fetch returns."""
    fetch = store.fetch(wanted)
    store.turn()
    assert fetch.is_done
    return [bytes(block) for block in fetch.result()]


def data(blocks: Sequence[StoredBlock]) -> list[bytes]:
    return [bytes(block.data) for block in blocks]
