"""Damaged files are misses that go, and folders that do not work turn the store off."""

import errno
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typing_extensions import override

from mlx_parallm.generation.kv_cache.disk import keeper
from mlx_parallm.generation.kv_cache.disk.files import Files
from mlx_parallm.generation.kv_cache.disk.format import FIXED_BYTES, MAGIC
from mlx_parallm.generation.kv_cache.disk.index import WAITING_BYTES
from mlx_parallm.generation.kv_cache.disk.keeper import LOG_NS, RETRY_NS
from mlx_parallm.generation.kv_cache.disk.store import SLOW_S, DiskStore
from tests.kv_disk import MIB, SECOND, Disk, FaultyFiles, chain, contents, data, read


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "kv")


def flip(position: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[position] ^= 1
        path.write_bytes(raw)

    return change


def cut(num_bytes: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, num_bytes)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_link(path: Path) -> None:
    target = path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(target)


def newer_version(path: Path) -> None:
    raw = path.read_bytes()
    assert raw.startswith(MAGIC)
    path.write_bytes(MAGIC[:-1] + b"\x02" + raw[len(MAGIC) :])


DAMAGES = {
    "empty": cut(0),
    "cut in its header": cut(FIXED_BYTES - 1),
    "cut in its entries": cut(FIXED_BYTES + 10),
    "cut in a block": cut(9_000),
    "a byte too short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "a byte too long": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "another magic": flip(0),
    "a newer version under the same name": newer_version,
    "another length": flip(9),
    "another entry": flip(FIXED_BYTES + 3),
    "another byte in the first block": flip(FIXED_BYTES + 20 * 60),
    "another byte in the last block": flip(-1),
    "removed": lambda path: path.unlink(),
    "a link": replace_by_link,
    "a folder": replace_by_folder,
}


#: A running store has read the header before, and finds the blocks as they were.
HEADER_DAMAGES = {
    "a byte too long",
    "another magic",
    "a newer version under the same name",
    "another length",
    "another entry",
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("is_running", [True, False])
def test_a_damaged_file_is_a_miss_and_goes(disk: Disk, damage: str, *, is_running: bool):
    store = disk.open()
    blocks, others = chain("a", 20), chain("b", 5)
    disk.save(store, blocks)
    (path,) = disk.files()
    disk.save(store, others)
    if not is_running:
        store.close()
    DAMAGES[damage](path)
    if not is_running:
        store = disk.open()
    num = store.find(contents(blocks))
    returned = read(store, contents(blocks)[:num])
    assert returned == data(blocks)[: len(returned)]
    if is_running and damage in HEADER_DAMAGES:
        assert len(returned) == 20
        store.close()
        store = disk.open()
    else:
        assert len(returned) < 20
    disk.clock.pass_s(3)
    store.turn()
    assert store.find(contents(blocks)) == 0
    assert not path.is_file() or path.is_symlink()
    assert store.stats.off == ""
    assert read(store, contents(others)) == data(others)
    disk.save(store, blocks)
    assert read(store, contents(blocks)) == data(blocks)


@pytest.mark.parametrize("is_running", [True, False])
def test_two_files_that_were_exchanged_give_no_wrong_byte(disk: Disk, *, is_running: bool):
    store = disk.open()
    first, second = chain("a", 20), chain("b", 20)
    disk.save(store, first)
    disk.save(store, second)
    one_path, other_path = disk.files()
    if not is_running:
        store.close()
    one_path.rename(disk.folder / "x")
    other_path.rename(one_path)
    (disk.folder / "x").rename(other_path)
    if not is_running:
        store = disk.open()
    for blocks in (first, second):
        num = store.find(contents(blocks))
        returned = read(store, contents(blocks)[:num])
        assert returned == data(blocks)[: len(returned)]
        # Names are arbitrary, so a store that opens the folder finds the right blocks in each.
        assert len(returned) == (0 if is_running else 20)


def test_a_file_of_another_model_under_the_name_of_this_one_is_not_read(disk: Disk):
    other = disk.open(owner="cd" * 32)
    blocks = chain("a", 5)
    disk.save(other, blocks)
    (path,) = disk.files()
    path.rename(path.with_name(path.name.replace("cd", "ab")))
    store = disk.open()
    assert store.find(contents(blocks)) == 0
    assert disk.files() == []


def test_files_of_other_formats_stay_and_count(disk: Disk):
    store, blocks = disk.open(limit_bytes=100_000), chain("a", 5)
    disk.save(store, blocks)
    (path,) = disk.files()
    newer = path.with_name(path.name.replace(".kv1", ".kv2"))
    newer.write_bytes(bytes(20_000))
    store.close()
    store = disk.open(limit_bytes=100_000)
    assert newer.exists()
    assert store.stats.used_bytes == disk.num_bytes() > 20_000
    assert store.find(contents(blocks)) == 5
    store.close()
    disk.open(limit_bytes=10_000)
    assert disk.num_bytes() <= 10_000


def test_files_that_are_not_of_a_store_are_left_alone(disk: Disk):
    disk.folder.mkdir()
    (disk.folder / "thesis.pdf").write_bytes(bytes(50_000))
    (disk.folder / "photos").mkdir()
    (disk.folder / "photos" / "a.kv1").write_bytes(bytes(50_000))
    store = disk.open(limit_bytes=40_000)
    for name in range(10):
        disk.save(store, chain(name, 5))
    own = disk.folder / disk.files()[-1].parent
    (own / "notes.txt").write_bytes(bytes(50_000))
    store.clear()
    store.turn()
    assert (disk.folder / "thesis.pdf").exists()
    assert (disk.folder / "photos" / "a.kv1").exists()


def test_damaged_files_take_one_line_a_minute(disk: Disk, caplog: pytest.LogCaptureFixture):
    store = disk.open()
    chains = [chain(name, 3) for name in range(4)]
    for blocks in chains:
        disk.save(store, blocks)
    for path in disk.files():
        flip(-1)(path)
    with caplog.at_level(logging.WARNING):
        for blocks in chains[:3]:
            read(store, contents(blocks))
            store.turn()
        assert len(caplog.records) == 1
        assert "other bytes" in caplog.text
        disk.clock.now_ns += LOG_NS
        read(store, contents(chains[3]))
        store.turn()
    assert len(caplog.records) == 2
    assert store.stats.discarded == {"damaged": 12}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_a_disk_that_takes_nothing_turns_the_store_off_for_a_while(
    disk: Disk, number: int, caplog: pytest.LogCaptureFixture
):
    files = FaultyFiles()
    store = disk.open(files=files)
    kept, lost, later = chain("kept", 5), chain("lost", 5), chain("later", 5)
    disk.save(store, kept)
    files.errors["write"] = number
    disk.save(store, lost)
    assert store.stats.off == os.strerror(number)
    assert store.stats.discarded == {"off": 5}
    assert len(disk.files()) == 1, "no half file is left"
    assert store.find(contents(lost)) == 0
    assert all(map(store.has, contents(lost))), "nothing is worth to be put"
    assert read(store, contents(kept)) == data(kept)
    disk.save(store, later)
    assert files.calls["write"] == 2
    assert store.stats.discarded == {"off": 10}
    disk.clock.now_ns += RETRY_NS
    assert not store.has(later[0].content)
    disk.save(store, later)
    assert store.stats.off == os.strerror(number)
    assert files.calls["write"] == 3
    assert len(caplog.records) == 1
    files.errors.clear()
    disk.clock.now_ns += RETRY_NS
    disk.save(store, later)
    assert store.stats.off == ""
    assert read(store, contents(later)) == data(later)


@pytest.mark.parametrize("call", ["list", "device"])
def test_an_unplugged_disk_is_forgotten_and_found_again(disk: Disk, call: str):
    files = FaultyFiles()
    store = disk.open(files=files)
    blocks = chain("a", 5)
    disk.save(store, blocks)
    files.errors = {call: errno.ENODEV, "read": errno.ENODEV}
    disk.clock.pass_s(3)
    store.turn()
    assert store.stats.off == os.strerror(errno.ENODEV)
    assert store.find(contents(blocks)) == 0
    files.errors = {}
    disk.clock.pass_s(3)
    store.turn()
    assert store.stats.off == ""
    assert store.find(contents(blocks)) == 5
    assert read(store, contents(blocks)) == data(blocks)


def test_nothing_is_written_where_another_file_system_appears(
    disk: Disk, caplog: pytest.LogCaptureFixture
):
    class Moved(Files):
        number = 1

        @override
        def device(self, path: Path) -> int:
            return self.number

    files = Moved()
    store, blocks = disk.open(files=files), chain("a", 5)
    # The disk is unplugged, and its mount point is a folder of another disk.
    elsewhere = disk.folder.rename(disk.folder.with_name("unplugged"))
    files.number = 2
    disk.save(store, blocks)
    assert "mounted" in store.stats.off
    assert "mounted" in caplog.text
    assert not disk.folder.exists()
    elsewhere.rename(disk.folder)
    files.number = 3
    disk.clock.now_ns += RETRY_NS
    disk.save(store, blocks)
    assert store.stats.off == ""
    assert store.find(contents(blocks)) == 5


@pytest.mark.parametrize("what", ["the folder", "what is in it", "the writer's folder"])
def test_a_user_may_remove_the_folder(disk: Disk, what: str):
    store, blocks = disk.open(), chain("a", 5)
    disk.save(store, blocks)
    if what == "the folder":
        shutil.rmtree(disk.folder)
    for path in disk.folder.glob("*"):
        if path.is_dir():
            shutil.rmtree(path)
        elif what == "what is in it":
            path.unlink()
    assert read(store, contents(blocks)) == []
    assert store.find(contents(blocks)) == 0
    disk.clock.pass_s(3)
    store.turn()
    assert store.stats.used_bytes == 0
    disk.save(store, blocks)
    assert store.stats.off == ""
    assert read(store, contents(blocks)) == data(blocks)
    assert store.stats.used_bytes == disk.num_bytes()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_process_without_descriptors_loses_no_file(disk: Disk, number: int):
    files = FaultyFiles()
    store, blocks = disk.open(files=files), chain("a", 5)
    disk.save(store, blocks)
    files.errors["read"] = number
    assert read(store, contents(blocks)) == []
    files.errors.clear()
    assert read(store, contents(blocks)) == data(blocks)
    store.close()
    files.errors["read"] = number
    store = disk.open(files=files)
    assert store.find(contents(blocks)) == 0
    files.errors.clear()
    disk.clock.now_ns += RETRY_NS
    store.turn()
    assert read(store, contents(blocks)) == data(blocks)


def test_a_folder_that_cannot_be_changed_is_still_read(disk: Disk):
    files = FaultyFiles()
    store, blocks = disk.open(files=files), chain("a", 5)
    disk.save(store, blocks)
    files.errors = dict.fromkeys(("write", "touch", "remove"), errno.EROFS)
    disk.clock.pass_s(120)
    store.find(contents(blocks))
    store.turn()
    assert store.stats.off == os.strerror(errno.EROFS)
    assert read(store, contents(blocks)) == data(blocks)


def test_a_thread_that_lacks_memory_while_it_reads_goes_on(disk: Disk):
    files = FaultyFiles()
    store, blocks = disk.open(files=files), chain("a", 5)
    disk.save(store, blocks)

    def fail() -> None:
        raise MemoryError

    files.before["read"] = fail
    assert read(store, contents(blocks)) == []
    files.before.clear()
    assert read(store, contents(blocks)) == data(blocks)


def test_a_write_that_cannot_begin_a_thread_turns_the_store_off_for_a_while(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
):
    store, blocks = disk.open(), chain("a", 5)

    def fail(blocks: object) -> list[bytes]:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(keeper, "block_digests", fail)
        disk.save(store, blocks)
    assert store.stats.off == "RuntimeError: can't start new thread"
    assert store.find(contents(blocks)) == 0
    assert store.room_bytes == WAITING_BYTES
    disk.clock.now_ns += RETRY_NS
    disk.save(store, blocks)
    assert store.stats.off == ""
    assert read(store, contents(blocks)) == data(blocks)


def test_a_read_that_takes_long_turns_finding_off(disk: Disk):
    files = FaultyFiles()
    store, blocks = disk.open(files=files), chain("a", 5)
    disk.save(store, blocks)
    seen: list[tuple[int, str]] = []

    def wait() -> None:
        disk.clock.pass_s(SLOW_S + 1)
        seen.append((store.find(contents(blocks)), store.stats.off))

    files.before["read"] = wait
    assert read(store, contents(blocks)) == data(blocks)
    assert seen == [(0, "the disk has not answered for 6 s")]
    assert store.find(contents(blocks)) == 5
    assert store.stats.off == ""


def test_a_write_that_takes_long_is_reported(disk: Disk):
    files = FaultyFiles()
    store = disk.open(files=files)
    seen: list[str] = []

    def wait() -> None:
        disk.clock.pass_s(10)
        seen.append(store.stats.off)

    files.before["write"] = wait
    disk.save(store, chain("a", 5))
    assert seen == ["the disk has not answered for 10 s"]
    assert store.stats.off == ""


def test_what_waits_is_bounded(disk: Disk):
    store: DiskStore = disk.open(limit_bytes=10 << 30)
    woken: list[None] = []
    store.wake_by(lambda: woken.append(None))
    block = bytes(16 * MIB)
    blocks = chain("a", WAITING_BYTES // len(block) + 3, 0)
    was_busy = False
    for each in blocks:
        store.put(type(each)(content=each.content, parent=each.parent, data=block))
        assert store.is_busy or not was_busy
        was_busy = store.is_busy
    assert was_busy
    assert store.stats.discarded == {"slow": 1, "orphan": 2}
    assert woken == []
    disk.clock.pass_s(3)
    store.turn()
    assert not store.is_busy
    assert woken == [None]
    assert store.find(contents(blocks)) == len(blocks) - 3


def test_a_busy_store_that_cannot_write_lets_its_engine_go_on(disk: Disk):
    files = FaultyFiles()
    store: DiskStore = disk.open(limit_bytes=10 << 30, files=files)
    woken: list[None] = []
    store.wake_by(lambda: woken.append(None))
    block = bytes(16 * MIB)
    for each in chain("a", WAITING_BYTES // len(block), 0):
        store.put(type(each)(content=each.content, parent=each.parent, data=block))
    assert store.is_busy
    files.errors["write"] = errno.ENOSPC
    disk.clock.pass_s(3)
    while store.is_busy:
        store.turn()
    assert woken == [None]


@pytest.mark.parametrize("size", [MIB, 75 * MIB, 300 * MIB])
def test_a_store_that_is_not_busy_has_room_for_its_largest_block(disk: Disk, size: int):
    store = disk.open(10 << 30, largest_bytes=size)
    assert store.room_bytes >= WAITING_BYTES
    state = bytes(size)
    count = 0
    while not store.is_busy:
        assert store.room_bytes >= size
        (block,) = chain(count, 1, 0)
        store.put(replace(block, data=state, is_state=True))
        count += 1
    assert store.stats.discarded == {}
    assert count >= (2 if size < WAITING_BYTES else 1)


def test_a_large_block_waits_alone(disk: Disk):
    store = disk.open(limit_bytes=10 << 30)
    (block,) = chain("a", 1, WAITING_BYTES + 32)
    store.put(block)
    assert store.find([block.content]) == 1


def test_the_clock_may_be_set_back(disk: Disk):
    store, blocks = disk.open(), chain("a", 5)
    disk.save(store, blocks)
    store.close()
    disk.clock.now_ns -= 100_000 * SECOND
    store = disk.open()
    assert store.find(contents(blocks)) == 5
    more = chain("b", 5)
    disk.save(store, more)
    assert read(store, contents(more)) == data(more)
