"""The disk store: what was put is found, read and verified, also after a restart."""

import itertools
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from typing_extensions import override

from mlx_parallm.generation.kv_cache.disk import store as store_module
from mlx_parallm.generation.kv_cache.disk.store import DiskStore
from mlx_parallm.generation.kv_cache.stores import BlockStore
from tests.kv_disk import OWNER, Disk, FaultyFiles, chain, contents, data, read
from tests.unit.generation.kv_cache.store_suite import LimitedStoreSuite
from tests.unit.generation.kv_cache.store_suite import read as read_awaited


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "kv")


def test_blocks_that_wait_are_found_and_read(disk: Disk):
    store, blocks = disk.open(), chain("a", 5)
    for block in blocks:
        store.put(block)
    assert disk.files() == []
    assert store.find(contents(blocks)) == 5
    assert read(store, contents(blocks)) == data(blocks)


def test_blocks_are_read_from_files(disk: Disk):
    store, blocks = disk.open(), chain("a", 70)
    disk.save(store, blocks)
    assert len(disk.files()) == 1
    assert store.find(contents(blocks)) == 70
    assert read(store, contents(blocks)) == data(blocks)
    assert read(store, contents(blocks)[40:50]) == data(blocks)[40:50]
    stats = store.stats
    assert (stats.written_blocks, stats.written_bytes) == (70, 70_000)
    assert (stats.read_blocks, stats.read_bytes) == (80, 80_000)
    assert stats.used_bytes == disk.num_bytes()


def test_a_state_has_a_file_of_its_own_behind_what_it_follows(disk: Disk):
    store, blocks = disk.open(), chain("a", 10)
    state = replace(chain("state", 1, 50_000, blocks[4].content)[0], is_state=True)
    whole = replace(chain("whole", 1, 50_000)[0], is_state=True)
    disk.save(store, [*blocks[:5], state, *blocks[5:], whole])
    assert len(disk.files()) == 4
    store.close()
    store = disk.open()
    for wanted in ([*blocks, state], [*blocks[:5], state], [whole]):
        assert store.find(contents(wanted)) == len(wanted)
        assert read(store, contents(wanted)) == data(wanted)
    (path,) = (each for each in disk.files() if state.content in each.read_bytes())
    path.unlink()
    disk.count_change()
    disk.clock.pass_s(3)
    store.turn()
    assert store.find(contents([state])) == 0
    assert store.find(contents(blocks)) == 10


def test_a_restart_finds_them(disk: Disk):
    store, blocks = disk.open(), chain("a", 70)
    disk.save(store, blocks)
    store.close()
    store = disk.open()
    assert store.find([*contents(blocks), b"x" * 32]) == 70
    assert read(store, contents(blocks)) == data(blocks)
    assert len(list(disk.folder.iterdir())) == 2, (
        "the folder of the writer that ended, and the lock"
    )


def test_what_waits_is_written_at_the_end(disk: Disk):
    store, blocks = disk.open(), chain("a", 5)
    for block in blocks:
        store.put(block)
    store.close()
    assert disk.open().find(contents(blocks)) == 5


def test_a_store_with_threads_does_the_same(tmp_path: Path):
    blocks = chain("a", 300, 100_000)
    store = DiskStore(tmp_path, OWNER, 1 << 30)
    for block in blocks:
        store.put(block)
    store.close()
    store = DiskStore(tmp_path, OWNER, 1 << 30)
    assert store.find(contents(blocks)) == 300
    assert read_awaited(store, contents(blocks)) == data(blocks)
    store.close()


def test_views_are_written_as_bytes_are(disk: Disk):
    store, blocks = disk.open(), chain("a", 40)
    whole = b"".join(data(blocks))
    for number, block in enumerate(blocks):
        view = memoryview(whole)[number * 1000 : (number + 1) * 1000]
        store.put(replace(block, data=view))
    assert read(store, contents(blocks)) == data(blocks)
    disk.clock.pass_s(3)
    store.turn()
    assert read(store, contents(blocks)) == data(blocks)
    store.close()
    assert read(disk.open(), contents(blocks)) == data(blocks)


def test_what_is_cancelled_is_not_read(disk: Disk):
    files = FaultyFiles()
    store, blocks = disk.open(files=files), chain("a", 100)
    disk.save(store, blocks)
    fetch = store.fetch(contents(blocks))
    fetch.cancel()
    store.turn()
    assert fetch.is_done
    assert files.calls["read"] == 0
    fetch = store.fetch(contents(blocks))
    files.before["read"] = fetch.cancel
    store.turn()
    assert fetch.is_done
    assert files.calls["read"] == 1
    assert store.stats.read_blocks == 0


def threads_of_stores() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kv-disk")]


def test_an_end_while_blocks_are_read_leaves_no_fetch_and_no_thread(tmp_path: Path):
    gate, is_reading = threading.Event(), threading.Event()
    files = FaultyFiles()
    store, chains = (
        DiskStore(tmp_path, OWNER, 1 << 30, files=files),
        [chain(n, 3) for n in range(30)],
    )
    for blocks in chains:
        for block in blocks:
            store.put(block)
    store.flush()

    def wait() -> None:
        is_reading.set()
        gate.wait()

    files.before["read"] = wait
    fetches = [store.fetch(contents(blocks)) for blocks in chains]
    is_reading.wait()
    end = threading.Thread(target=store.close)
    end.start()
    gate.set()
    end.join()
    for thread in threads_of_stores():
        thread.join()
    for fetch, blocks in zip(fetches, chains, strict=True):
        assert fetch.is_done
        assert list(fetch.result()) in ([], data(blocks))
    assert store.fetch(contents(chains[0])).is_done


def test_an_end_does_not_wait_long_for_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate, files = threading.Event(), FaultyFiles()
    files.before["write"] = gate.wait
    store = DiskStore(tmp_path, OWNER, 1 << 30, files=files)
    for block in chain("a", 3):
        store.put(block)
    monkeypatch.setattr(store_module, "CLOSE_WITHIN_S", 0.0)
    store.close()
    assert not gate.is_set()
    gate.set()
    for thread in threads_of_stores():
        thread.join()
    again = DiskStore(tmp_path, OWNER, 1 << 30)
    assert again.find(contents(chain("a", 3))) == 3
    again.close()
    # Tests that look for threads of stores may run in this process.
    for thread in threads_of_stores():
        thread.join()


class TestSuite(LimitedStoreSuite):
    """A store with threads passes the suite of all stores."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folders = (tmp_path / str(number) for number in itertools.count())

    @override
    def make_store(self, limit_bytes: int) -> BlockStore:
        folder = next(self.folders)
        folder.mkdir()
        return DiskStore(folder, OWNER, limit_bytes)

    @override
    def settle(self, store: BlockStore) -> None:
        assert isinstance(store, DiskStore)
        store.flush()


def test_clear_forgets_and_removes_all_files_of_the_owner(disk: Disk):
    store, other = disk.open(), disk.open(owner="cd" * 32)
    blocks, others = chain("a", 5), chain("b", 5)
    disk.save(store, blocks)
    disk.save(other, others)
    waiting = chain("c", 5)
    for block in waiting:
        store.put(block)
    store.clear()
    assert store.find(contents(blocks)) == store.find(contents(waiting)) == 0
    store.turn()
    assert len(disk.files()) == 1
    assert other.find(contents(others)) == 5
    store.close()
    store = disk.open()
    assert store.find(contents(blocks)) == store.find(contents(waiting)) == 0
