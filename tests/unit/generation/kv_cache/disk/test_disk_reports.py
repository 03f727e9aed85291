"""Faults that users reported of other stores of KV on a disk, as small histories of this one."""

import errno
import random
from collections import Counter
from pathlib import Path

import pytest

from mlx_parallm.generation.kv_cache.disk.index import MAX_UNREAD
from tests.kv_disk import Disk, FaultyFiles, chain, contents, data, read


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path / "kv")


def test_a_shared_beginning_is_found_however_much_comes_after_it(disk: Disk):
    # sgl-project/sglang#26886: no hit, because heads of prefixes were evicted before their tails.
    limit_bytes = 100_000
    store, system = disk.open(limit_bytes), chain("system prompt", 10)
    disk.save(store, system)
    for name in range(60):
        tail = chain(name, 15, parent=system[-1].content)
        wanted = contents(system + tail)
        num = store.find(wanted)
        assert num == 10
        assert read(store, wanted[:num]) == data(system)
        disk.save(store, tail)
        assert disk.num_bytes() <= limit_bytes


def test_all_that_was_written_below_the_limit_is_found_after_a_restart(disk: Disk):
    # sgl-project/sglang#27619 (3 % hits), LMCache/LMCache#562, #1788 (none).
    store = disk.open(limit_bytes=1_000_000)
    chains = [chain(name, 12) for name in range(64)]
    for blocks in chains:
        disk.save(store, blocks)
    disk.kill(store)
    store = disk.open(limit_bytes=1_000_000)
    for blocks in chains:
        assert store.find(contents(blocks)) == 12
        assert read(store, contents(blocks)) == data(blocks)


def test_a_chain_that_comes_in_pieces_is_whole(disk: Disk):
    # sgl-project/sglang#39444: the end of a first-seen prefix was not written.
    store, blocks = disk.open(), chain("a", 250)
    for at in range(0, 250, 16):
        disk.save(store, blocks[at : at + 16])
    disk.kill(store)
    store = disk.open()
    assert store.find(contents(blocks)) == 250
    assert read(store, contents(blocks)) == data(blocks)


def test_other_weights_under_the_same_name_find_nothing(disk: Disk):
    # sgl-project/sglang#24758: KV of another checkpoint with the same served name was used.
    disk.save(disk.open(owner="ab" * 32), chain("prompt", 10))
    assert disk.open(owner="ab" * 31 + "ac").find(contents(chain("prompt", 10))) == 0


def test_two_processes_write_the_same_blocks_at_once(disk: Disk):
    # sgl-project/sglang#26670: ranks wrote one file, and outputs were garbled.
    stores, blocks = [disk.open(), disk.open()], chain("a", 10)
    for store in stores:
        for block in blocks:
            store.put(block)
    disk.clock.pass_s(3)
    for _ in range(2):
        for store in stores:
            store.turn()
            assert read(store, contents(blocks)) == data(blocks)
        disk.clock.pass_s(3)
    stores[0].close()
    for path in disk.files()[:1]:
        path.unlink()
    assert disk.open().find(contents(blocks)) == 10


def test_another_model_takes_no_more_than_there_is(disk: Disk):
    # jundot/omlx#1915, #2064: the limit did not hold after a switch of models, nor at the start.
    for number in range(6):
        store = disk.open(limit_bytes=50_000, owner=f"{number:064x}")
        for name in range(12):
            disk.save(store, chain(name, 5))
            assert disk.num_bytes() <= 50_000
        store.close()
    disk.open(limit_bytes=20_000)
    assert disk.num_bytes() <= 20_000


def test_a_file_that_is_missing_in_the_midst_ends_the_prefix(disk: Disk):
    # jundot/omlx#1070 (a reconstruction with holes), LMCache/LMCache#1313 (the engine ended).
    store, blocks = disk.open(), chain("a", 30)
    for at in range(0, 30, 10):
        disk.save(store, blocks[at : at + 10])
    by_time = sorted(disk.files(), key=lambda path: path.stat().st_mtime_ns)
    by_time[1].unlink()
    assert store.find(contents(blocks)) == 30
    assert read(store, contents(blocks)) == data(blocks)[:10]
    assert store.find(contents(blocks)) == 10
    disk.save(store, blocks[10:20])
    assert read(store, contents(blocks)) == data(blocks)


def test_a_write_that_fails_is_not_found(disk: Disk):
    # LMCache/LMCache#4991: failed stores stayed visible, and answers were gibberish.
    files = FaultyFiles(errors={"write": errno.EIO})
    store, blocks = disk.open(files=files), chain("a", 10)
    disk.save(store, blocks)
    assert store.find(contents(blocks)) == 0
    assert read(store, contents(blocks)) == []
    disk.kill(store)
    assert disk.open().find(contents(blocks)) == 0


def test_a_read_that_fails_returns_what_was_verified_before(disk: Disk):
    # vllm-project/vllm#20063: after an error of the disk, the model computed with random bytes.
    files = FaultyFiles()
    store, blocks = disk.open(files=files), chain("a", 20)
    disk.save(store, blocks[:10])
    disk.save(store, blocks[10:])
    reads = 0

    def fail_second() -> None:
        nonlocal reads
        reads += 1
        files.errors = {"read": errno.EIO} if reads == 2 else {}

    files.before["read"] = fail_second
    assert read(store, contents(blocks)) == data(blocks)[:10]
    assert store.stats.discarded == {"unreadable": 10}


def test_what_is_evicted_between_find_and_fetch_is_a_miss(disk: Disk):
    # LMCache/LMCache#1060: the server ended if a block that was seen could not be had.
    first, second = disk.open(limit_bytes=30_000), disk.open(limit_bytes=30_000)
    blocks = chain("a", 5)
    disk.save(first, blocks)
    for name in range(4):
        disk.save(first, chain(name, 5))
    assert first.find(contents(blocks)) == 5
    for name in range(4, 6):
        disk.save(second, chain(name, 5))
    assert read(first, contents(blocks)) == []
    assert first.find(contents(blocks)) == 0
    assert not first.stats.discarded


def test_a_conversation_that_grows_is_written_once(disk: Disk):
    # nirecom/cc-local-llm#6: every checkpoint wrote the whole prefix again, 137 GB of a session.
    store, conversation = disk.open(), chain("turns", 200)
    for turn in range(10, 201, 5):
        for block in conversation[:turn]:
            if not store.has(block.content):
                store.put(block)
        disk.clock.pass_s(3)
        store.turn()
    assert store.stats.written_bytes == 200 * 1000
    assert disk.num_bytes() < 1.1 * 200 * 1000


def test_the_file_that_follows_a_damaged_one_stays(disk: Disk):
    # LMCache/LMCache#3292: a failed read removed the file that had replaced the failed one.
    store, blocks = disk.open(), chain("a", 5)
    disk.save(store, blocks)
    (path,) = disk.files()
    path.write_bytes(bytes(path.stat().st_size))
    fetches = [store.fetch(contents(blocks)) for _ in range(3)]
    store._readers.read_waiting()
    for block in blocks:
        store.put(block)
    disk.clock.pass_s(3)
    store.turn()
    store.turn()
    assert [list(fetch.result()) for fetch in fetches] == [[], [], []]
    assert not path.exists()
    assert read(store, contents(blocks)) == data(blocks)


def test_ten_thousand_requests_at_the_limit_write_nothing_in_vain_again_and_again(disk: Disk):
    # A folder that is too small for what is asked for could be written all the time.
    source, store = random.Random(0), disk.open(limit_bytes=60_000)
    num_wasted: Counter[int] = Counter()
    written: set[int] = set()
    for _ in range(10_000):
        name = source.randrange(100)
        blocks = chain(name, 5)
        num = store.find(contents(blocks))
        if num and source.random() < 0.1:
            assert read(store, contents(blocks)[:num]) == data(blocks)[:num]
            num_wasted[name] = 0
            written.discard(name)
        elif not num and name in written:
            num_wasted[name] += 1
            written.discard(name)
        if not store.has(blocks[0].content):
            disk.save(store, blocks)
            written.add(name)
    assert max(num_wasted.values()) <= MAX_UNREAD
    assert len([name for name, num in num_wasted.items() if num == MAX_UNREAD]) > 50


@pytest.mark.parametrize("seed", range(3))
def test_a_busy_folder_at_its_limit_keeps_what_is_used_often(disk: Disk, seed: int):
    # sgl-project/sglang#26886: 1,200 GB were written in two hours, and nothing was read.
    source, store = random.Random(seed), disk.open(limit_bytes=120_000)
    num_hits = num_asked = 0
    for _ in range(400):
        name = min(int(source.expovariate(0.08)), 80)
        blocks = chain(name, 5)
        num = store.find(contents(blocks))
        assert read(store, contents(blocks)[:num]) == data(blocks)[:num]
        num_hits, num_asked = num_hits + num, num_asked + 5
        if not all(map(store.has, contents(blocks))):
            disk.save(store, blocks)
    # The folder has room for 22 of 80 prompts.
    assert num_hits > 0.6 * num_asked
    assert disk.num_bytes() <= 120_000
