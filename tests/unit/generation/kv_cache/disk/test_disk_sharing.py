"""Stores of several processes, models and versions in one folder."""

import fcntl
import gc
import os
import shutil
import stat
from pathlib import Path

import pytest

from mlx_parallm.generation.kv_cache.disk.folder import LOCK, check_kv_folder, locked
from mlx_parallm.generation.kv_cache.disk.index import MAX_UNREAD
from mlx_parallm.generation.kv_cache.disk.keeper import SAVE_USES_NS
from mlx_parallm.generation.kv_cache.disk.runs import Run
from mlx_parallm.generation.kv_cache.disk.store import DiskStore
from mlx_parallm.generation.kv_cache.disk.upkeep import clear_folder
from mlx_parallm.types.errors import ConfigError
from tests.kv_disk import Disk, chain, contents, data, read

OTHER = "cd" * 32


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "kv")


def writers(disk: Disk) -> list[Path]:
    return sorted(path for path in disk.folder.iterdir() if path.is_dir())


def num_left(store: DiskStore, names: range) -> list[int]:
    return [name for name in names if store.find(contents(chain(name, 5)))]


def scan(disk: Disk, *stores: DiskStore) -> None:
    disk.clock.pass_s(3)
    for store in stores:
        store.turn()


def test_each_finds_what_others_wrote(disk: Disk):
    first, second = disk.open(), disk.open()
    blocks, more = chain("a", 5), chain("b", 5)
    disk.save(first, blocks)
    disk.save(second, more)
    scan(disk, first)
    assert read(second, contents(blocks)) == data(blocks)
    assert read(first, contents(more)) == data(more)
    assert len(writers(disk)) == 2


def test_folders_and_files_are_for_their_user_alone(disk: Disk):
    old_mask = os.umask(0)
    try:
        check_kv_folder(disk.folder)
        disk.save(disk.open(), chain("a", 5))
    finally:
        os.umask(old_mask)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in disk.folder.rglob("*") if path.is_dir()}
    assert modes == {0o700}
    assert stat.S_IMODE(disk.folder.stat().st_mode) == 0o700
    files = [path for path in disk.folder.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_the_least_recently_used_file_is_evicted(disk: Disk):
    store = disk.open(limit_bytes=5 * 5500)
    for name in range(5):
        disk.save(store, chain(name, 5))
    assert store.find(contents(chain(0, 5))) == 5
    disk.save(store, chain(5, 5))
    assert num_left(store, range(6)) == [0, 2, 3, 4, 5]
    assert disk.num_bytes() <= 5 * 5500
    assert store.stats.used_bytes == disk.num_bytes()


def test_uses_outlast_the_process(disk: Disk):
    store = disk.open(limit_bytes=5 * 5500)
    for name in range(5):
        disk.save(store, chain(name, 5))
    store.find(contents(chain(0, 5)))
    disk.clock.now_ns += SAVE_USES_NS
    store.turn()
    store.find(contents(chain(1, 5)))
    store.close()
    store = disk.open(limit_bytes=5 * 5500)
    disk.save(store, chain(5, 5))
    disk.save(store, chain(6, 5))
    assert num_left(store, range(7)) == [0, 1, 4, 5, 6]


def test_another_process_sees_uses(disk: Disk):
    first = disk.open(limit_bytes=5 * 5500)
    for name in range(4):
        disk.save(first, chain(name, 5))
    second = disk.open(limit_bytes=5 * 5500)
    assert second.find(contents(chain(0, 5))) == 5
    disk.clock.now_ns += SAVE_USES_NS
    second.turn()
    for name in range(4, 7):
        disk.save(first, chain(name, 5))
    assert num_left(first, range(7)) == [0, 3, 4, 5, 6]

    # A server that is killed at any time leaves no file that is newer than its beginning.
    """A server that is killed at any time leaves no file that is newer than its beginning."""
    limit_bytes = 80_000
    store = disk.open(limit_bytes)
    start = chain("start", 5)
    disk.save(store, start)
    ways = [chain(name, 5, parent=start[-1].content) for name in range(6)]
    for way in ways:
        disk.save(store, way)
        disk.save(store, chain(("other", way[0].content), 5))
    # The store is not closed: uses that it would save now are lost.
    again = disk.open(limit_bytes)
    for name in range(20):
        disk.save(again, chain(("more", name), 5))
        if any(again.find(contents(way)) for way in ways):
            assert again.find(contents(start)) == 5


def test_a_chain_larger_than_the_limit_keeps_its_beginning_and_nothing_else(disk: Disk):
    store, blocks = disk.open(limit_bytes=50_000), chain("a", 200)
    disk.save(store, blocks)
    num = store.find(contents(blocks))
    assert num >= 35
    assert sum(store.find([content]) for content in contents(blocks)) == num
    assert store.stats.discarded.keys() == {"full", "orphan"}


def test_a_beginning_is_written_before_what_follows_it(disk: Disk):
    store, start = disk.open(), chain("a", 5)
    way = chain("b", 5, parent=start[1].content)
    for block in start + way:
        store.put(block)
    disk.clock.pass_s(0.3)
    # More of the first way comes later than the last of the second.
    for block in chain("c", 5, parent=start[-1].content):
        store.put(block)
    disk.clock.pass_s(0.3)
    store.turn()
    disk.kill(store)
    assert disk.open().find(contents(start[:2] + way)) == 7


def test_the_limit_holds_over_models_and_formats(disk: Disk):
    limit_bytes = 10 * 5500
    first, second = disk.open(limit_bytes), disk.open(limit_bytes, owner=OTHER)
    for name in range(20):
        disk.save(first, chain(("first", name), 5))
        assert disk.num_bytes() <= limit_bytes
        disk.save(second, chain(("second", name), 5))
        assert disk.num_bytes() <= limit_bytes
    assert [len(list(writer.glob("*.kv1"))) for writer in writers(disk)] == [5, 5]


def test_of_two_limits_the_smaller_counts(disk: Disk):
    large, small = disk.open(limit_bytes=100_000), disk.open(limit_bytes=30_000)
    for name in range(10):
        disk.save(large, chain(name, 5))
        scan(disk, small)
        assert disk.num_bytes() <= 30_000


def test_the_limit_holds_at_the_start(disk: Disk):
    store = disk.open()
    for name in range(10):
        disk.save(store, chain(name, 5))
    store.close()
    store = disk.open(limit_bytes=3 * 5500)
    assert disk.num_bytes() <= 3 * 5500
    assert num_left(store, range(10)) == [7, 8, 9]


def test_a_process_that_came_later_gets_its_share(disk: Disk):
    limit_bytes = 10 * 5500
    first = disk.open(limit_bytes)
    for name in range(10):
        disk.save(first, chain(name, 5))
    second = disk.open(limit_bytes)
    for name in range(10, 20):
        disk.save(second, chain(name, 5))
    assert sorted(len(list(writer.glob("*.kv1"))) for writer in writers(disk)) == [5, 5]
    scan(disk, first)
    assert num_left(first, range(20)) == [5, 6, 7, 8, 9, 15, 16, 17, 18, 19]


def test_what_processes_that_ended_wrote_is_evicted_first(disk: Disk):
    limit_bytes = 10 * 5500
    both = disk.open(limit_bytes), disk.open(limit_bytes)
    for number, store in enumerate(both):
        for name in range(4):
            disk.save(store, chain((number, name), 5))
    for store in both:
        store.close()
    store = disk.open(limit_bytes)
    assert len(writers(disk)) == 2, "a folder was taken over"
    for name in range(6):
        disk.save(store, chain(name, 5))
    assert num_left(store, range(6)) == list(range(6))
    assert sorted(len(list(writer.glob("*.kv1"))) for writer in writers(disk)) == [0, 10]
    store.close()
    disk.open(limit_bytes)
    assert len(writers(disk)) == 1, "empty folders go"


def test_half_files_of_a_process_that_was_killed_go(disk: Disk):
    disk.save(disk.open(), chain("a", 5))
    (path,) = disk.files()
    path.rename(path.with_name(path.name + ".part"))
    store = disk.open()
    assert disk.files() == []
    assert store.stats.used_bytes == 0


def test_what_is_dropped_unread_is_not_written_forever(disk: Disk):
    limit_bytes = 3 * 5500
    store = disk.open(limit_bytes)
    chains = [chain(name, 5) for name in range(4)]
    for _ in range(20):
        for blocks in chains:
            if not store.has(blocks[0].content):
                disk.save(store, blocks)
    assert store.stats.written_blocks <= 5 * MAX_UNREAD * len(chains)
    written = store.stats.written_blocks
    unwanted = next(blocks for blocks in chains if not store.find(contents(blocks)))
    assert all(map(store.has, contents(unwanted)))
    disk.save(store, unwanted)
    assert store.stats.written_blocks == written
    assert store.stats.discarded == {"unread": 5}


def test_what_another_process_drops_unread_counts_too(disk: Disk):
    store, blocks, others = disk.open(), chain("a", 5), chain("b", 5)
    disk.save(store, others)
    (kept,) = disk.files()
    for _ in range(MAX_UNREAD):
        assert not any(map(store.has, contents(blocks)))
        disk.save(store, blocks)
        (path,) = set(disk.files()) - {kept}
        disk.count_change()
        path.unlink()
        scan(disk, store)
    assert all(map(store.has, contents(blocks)))


def test_what_a_user_removes_does_not_count(disk: Disk):
    store, blocks = disk.open(), chain("a", 5)
    for _ in range(2 * MAX_UNREAD):
        disk.save(store, blocks)
        clear_folder(disk.folder)
        scan(disk, store)
    assert not any(map(store.has, contents(blocks)))


def test_what_is_read_is_written_again(disk: Disk):
    store = disk.open(limit_bytes=2 * 5500)
    for name in range(20):
        blocks = chain("again", 5)
        disk.save(store, blocks)
        assert read(store, contents(blocks)) == data(blocks)
        disk.save(store, chain((name, 0), 5))
        disk.save(store, chain((name, 1), 5))
        assert store.find(contents(blocks)) == 0


def test_a_clear_holds_for_what_others_write_later(disk: Disk):
    first, second = disk.open(), disk.open()
    late, kept = chain("late", 5), chain("kept", 5)
    for block in late:
        second.put(block)
    disk.clock.pass_s(0.1)
    first.clear()
    disk.clock.pass_s(0.1)
    for block in kept:
        second.put(block)
    scan(disk, second, first)
    assert first.find(contents(late)) == 0
    assert read(first, contents(kept)) == data(kept)
    scan(disk, first, second)
    assert second.find(contents(late)) == 0


def test_a_clear_while_the_disk_does_not_work_holds_later(disk: Disk):
    store, blocks = disk.open(), chain("a", 5)
    disk.save(store, blocks)
    disk.clock.pass_s(0.1)
    elsewhere = disk.folder.rename(disk.folder.with_name("unplugged"))
    store.clear()
    scan(disk, store)
    shutil.rmtree(disk.folder, ignore_errors=True)
    elsewhere.rename(disk.folder)
    scan(disk, store)
    assert store.find(contents(blocks)) == 0
    scan(disk, store)
    assert disk.files() == []


def test_clears_leave_nothing_of_what_was(disk: Disk):
    store = disk.open()
    for name in range(300):
        disk.save(store, chain(name, 1))
        store.clear()
        disk.clock.pass_s(3)
        store.turn()
    del store
    gc.collect()
    assert sum(isinstance(each, Run) for each in gc.get_objects()) < 150


def test_many_stores_leave_no_descriptor_open(disk: Disk):
    def num_open() -> int:
        return len(os.listdir("/dev/fd"))

    disk.save(disk.open(), chain("a", 5))
    before = num_open()
    for name in range(3):
        store = disk.open()
        disk.save(store, chain(name, 5))
        read(store, contents(chain("a", 5)))
        store.close()
        store.close()
    assert num_open() == before


def test_a_lock_whose_file_was_replaced_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    system_flock, num_calls = fcntl.flock, 0

    def flock(descriptor: int, operation: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            (tmp_path / LOCK).unlink()
            (tmp_path / LOCK).write_bytes(b"")
        system_flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path) as counter:
        assert counter.increase() == 1
    assert (tmp_path / LOCK).read_bytes()[:1] == b"\x01"
    assert num_calls == 2


class TestFolder:
    def test_it_is_made_with_its_parents(self, tmp_path: Path):
        check_kv_folder(tmp_path / "a" / "kv")
        assert stat.S_IMODE((tmp_path / "a" / "kv").stat().st_mode) == 0o700

    def test_a_relative_path_and_one_that_is_there_are_taken(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.chdir(tmp_path)
        check_kv_folder(Path("kv"))
        check_kv_folder(Path("kv"))
        (tmp_path / "link").symlink_to("kv")
        check_kv_folder(Path("link"))

    @pytest.mark.parametrize("below", [".", "kv", "kv/more"])
    def test_a_file_is_refused(self, tmp_path: Path, below: str):
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(ConfigError, match=r"--kv-disk: .*file.* (folder|Not a directory)"):
            check_kv_folder(tmp_path / "file" / below)

    def test_a_link_that_leads_nowhere_is_refused(self, tmp_path: Path):
        (tmp_path / "link").symlink_to("nowhere")
        with pytest.raises(ConfigError, match="--kv-disk"):
            check_kv_folder(tmp_path / "link")

    def test_a_folder_that_cannot_be_written_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        # Root may write anywhere, so the system's answer is replaced.
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(ConfigError, match=r"--kv-disk: .*kv is not writable"):
            check_kv_folder(tmp_path / "kv")

    def test_a_folder_of_another_user_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(ConfigError, match=r"--kv-disk: .*kv belongs to another user"):
            check_kv_folder(tmp_path / "kv")

    @pytest.mark.parametrize("mode", [0o755, 0o1777])
    def test_a_folder_below_one_of_another_user_is_refused_unless_it_is_sticky(
        self, tmp_path: Path, mode: int
    ):
        kv, home = tmp_path / "home" / "kv", tmp_path / "home"
        kv.mkdir(parents=True)

        def foreign_home(path: Path) -> os.stat_result:
            values = list(os.stat(path))
            if path == home.resolve():
                values[stat.ST_UID] = os.getuid() + 1
                values[stat.ST_MODE] = stat.S_IFDIR | mode
            return os.stat_result(values)

        if mode == 0o1777:
            check_kv_folder(kv, state_of=foreign_home)
        else:
            with pytest.raises(ConfigError, match=r"--kv-disk: .*kv is below .*home, which"):
                check_kv_folder(kv, state_of=foreign_home)

    @pytest.mark.parametrize("mode", [0o700, 0o750, 0o755, 0o770, 0o777, 0o1777])
    def test_a_folder_that_other_users_can_write_is_refused(self, tmp_path: Path, mode: int):
        kv = tmp_path / "kv"
        kv.mkdir()
        kv.chmod(mode)
        if mode & 0o022 == 0:
            check_kv_folder(kv)
        else:
            with pytest.raises(ConfigError, match=r"--kv-disk: .*kv can be written by other users"):
                check_kv_folder(kv)

    @pytest.mark.parametrize("mode", [0o755, 0o777, 0o1777])
    def test_a_folder_that_all_users_can_exchange_is_refused(self, tmp_path: Path, mode: int):
        kv, open_to_all = tmp_path / "shared" / "kv", tmp_path / "shared"
        kv.mkdir(parents=True, mode=0o700)
        kv.chmod(0o700)
        open_to_all.chmod(mode)
        if mode == 0o777:
            with pytest.raises(ConfigError, match=r"--kv-disk: .*kv is below .*shared, in which"):
                check_kv_folder(kv)
        else:
            check_kv_folder(kv)
