"""Random histories of several stores in one folder, with restarts, damage and errors."""

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_parallm.generation.kv_cache.disk.store import DiskStore
from mlx_parallm.generation.kv_cache.stores import StoredBlock
from tests.kv_disk import SECOND, Disk, FaultyFiles, chain, contents, data, read

NUM_STEPS = 120
LIMIT_BYTES = 60_000
OWNERS = ("ab" * 32, "cd" * 32)


class History:
    """Stores of one folder, what was put by owner, and what is forbidden to be found."""

    def __init__(self, disk: Disk, seed: int) -> None:
        self.disk = disk
        self.source = random.Random(seed)
        self.open: list[tuple[str, DiskStore, FaultyFiles]] = []
        self.data: dict[tuple[str, bytes], bytes] = {}
        self.chains: list[list[StoredBlock]] = []
        self.forgotten: dict[DiskStore, set[bytes]] = {}

    def step(self) -> None:
        actions: list[tuple[Callable[[], None], int]] = [
            (self.start, 2),
            (self.end, 1),
            (self.kill, 1),
            (self.put, 10),
            (self.read, 10),
            (self.wait, 6),
            (self.damage, 2),
            (self.clear, 1),
            (self.fail, 1),
        ]
        (act,) = self.source.choices(
            [action for action, _ in actions], [weight for _, weight in actions]
        )
        if self.open or act == self.start:
            act()
        assert self.disk.num_bytes() <= LIMIT_BYTES

    def start(self) -> None:
        if len(self.open) < 4:
            files, owner = FaultyFiles(), self.source.choice(OWNERS)
            store = self.disk.open(LIMIT_BYTES, owner, files)
            self.open.append((owner, store, files))
            self.forgotten[store] = set()

    def end(self) -> None:
        self.open.pop(self.source.randrange(len(self.open)))[1].close()

    def kill(self) -> None:
        """End a store without what waits; a half file stays, as after SIGKILL during a write."""
        _, store, _ = self.open.pop(self.source.randrange(len(self.open)))
        self.disk.kill(store)
        folders = [path for path in self.disk.folder.iterdir() if path.is_dir()]
        room = LIMIT_BYTES - self.disk.num_bytes()
        part = (
            self.source.choice(folders) / f"{OWNERS[0]}-{self.source.randrange(1 << 30):x}.kv1.part"
        )
        self.disk.count_change()
        part.write_bytes(bytes(self.source.randint(0, min(room, 3000))))

    def put(self) -> None:
        owner, store, _ = self.source.choice(self.open)
        start = self.source.choice(self.chains)[: self.source.randint(0, 8)] if self.chains else []
        name = self.source.randrange(12)
        parent = start[-1].content if start else b""
        size = self.source.choice([10, 700, 3000])
        blocks = start + chain((owner, name, size), self.source.randint(1, 12), size, parent)
        self.chains.append(blocks)
        for block in blocks:
            self.data[owner, block.content] = bytes(block.data)
            if not store.has(block.content):
                store.put(block)
                for by, other, _ in self.open:
                    if by == owner:
                        self.forgotten[other].discard(block.content)

    def read(self) -> None:
        owner, store, _ = self.source.choice(self.open)
        if not self.chains:
            return
        blocks = self.source.choice(self.chains)
        wanted = contents(blocks)
        at = self.source.randint(0, len(wanted))
        store.use(wanted[:at])
        num = store.find(wanted[at:])
        assert not self.forgotten[store] & set(wanted[at : at + num])
        returned = read(store, wanted[at:])
        assert returned == data(blocks)[at : at + len(returned)]
        assert all((owner, content) in self.data for content in wanted[at : at + len(returned)])

    def wait(self) -> None:
        self.disk.clock.now_ns += int(self.source.choice([0.1, 0.6, 2.5, 61]) * SECOND)
        for _, store, _ in self.open:
            store.turn()

    def damage(self) -> None:
        files = self.disk.files()
        if not files:
            return
        path = self.source.choice(files)
        raw = bytearray(path.read_bytes())
        match self.source.randrange(5):
            case 0 if raw:
                raw[self.source.randrange(len(raw))] ^= self.source.randint(1, 255)
                path.write_bytes(raw)
            case 1:
                path.write_bytes(raw[: self.source.randint(0, len(raw))])
            case 2:
                path.unlink()
            case 3:
                other = self.source.choice(files)
                kept = other.read_bytes()
                other.write_bytes(raw)
                path.write_bytes(kept)
                self.disk.count_change()
            case _:
                time_ns = self.source.randrange(1 << 61)
                os.utime(path, ns=(time_ns, time_ns))

    def clear(self) -> None:
        owner, store, _ = self.source.choice(self.open)
        store.clear()
        self.disk.clock.now_ns += 1
        self.forgotten[store] = {content for by, content in self.data if by == owner}

    def fail(self) -> None:
        _, _, files = self.source.choice(self.open)
        calls = ["write", "read", "list", "touch", "remove", "device"]
        number = self.source.choice([errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EROFS])
        files.errors = {} if files.errors else {self.source.choice(calls): number}


def run(folder: Path, seed: int) -> None:
    history = History(Disk(folder), seed)
    history.start()
    for _ in range(NUM_STEPS):
        history.step()
    for _, store, _ in history.open:
        store.close()


@pytest.mark.parametrize("seed", range(20))
def test_no_wrong_byte_is_read_and_the_limit_holds(tmp_path: Path, seed: int):
    run(tmp_path / "kv", seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 1100, 100))
def test_it_does_so_in_a_thousand_histories(tmp_path: Path, first: int):
    for seed in range(first, first + 100):
        run(tmp_path / str(seed), seed)
