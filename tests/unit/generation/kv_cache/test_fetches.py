"""Chains that are read from stores: their order, the memory they take, and when they are late."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from mlx_parallm.generation.kv_cache import fetches
from mlx_parallm.generation.kv_cache.fetches import (
    LONGEST_READ_S,
    RETRY_S,
    SILENT_S,
    ChainFetch,
    FetchQueue,
    Run,
)
from mlx_parallm.generation.kv_cache.stores import StoredBlock
from mlx_parallm.generation.kv_cache.tiers import Tiers
from tests.dict_store import DictStore

BLOCK_BYTES, SIZE = 100, 16


@dataclass
class Desk:
    """A queue over a store whose fetches wait, and its clock."""

    now_s: float = 0.0
    store: DictStore = field(default_factory=lambda: DictStore(holds_back=True))
    queue: FetchQueue = field(init=False)
    count: int = 0

    def __post_init__(self) -> None:
        self.queue = FetchQueue(BLOCK_BYTES, lambda: self.now_s)
        self.store.wake_by(self.queue.note_done)

    def add(self, num_blocks: int, store: DictStore | None = None) -> ChainFetch | None:
        """Ask for a new chain that the store has."""
        runs = [self.run(num_blocks, store or self.store)]
        return self.queue.add(runs, num_blocks * SIZE)

    def run(self, num_blocks: int, store: DictStore) -> Run:
        numbers = range(self.count, self.count + num_blocks)
        self.count += num_blocks
        contents = [b"%d" % number for number in numbers]
        for content in contents:
            store.put(StoredBlock(content=content, parent=b"", data=content))
        return Run(store, contents)

    def begun(self, num_blocks: int) -> ChainFetch:
        fetch = self.add(num_blocks)
        assert fetch is not None
        return fetch


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(fetches, "FETCH_BYTES", 10 * BLOCK_BYTES)
    return Desk()


def test_reads_take_a_bound_of_memory_in_the_order_they_were_asked_for(desk: Desk) -> None:
    chains = [desk.begun(num_blocks) for num_blocks in (4, 6, 1, 12, 3)]
    queue = desk.queue
    assert [bool(chain.reads) for chain in chains] == [True, True, False, False, False]
    desk.store.complete()
    # What was read takes memory until its blocks are filled.
    assert queue.take(chains[0]) == [(b"%d" % n, "dict") for n in range(4)]
    assert not chains[2].reads
    queue.release(chains[0])
    assert chains[2].reads
    queue.release(chains[2])
    assert not chains[3].reads
    # A chain larger than the bound is read alone.
    queue.release(chains[1])
    assert chains[3].reads
    assert not chains[4].reads
    queue.check_integrity(chains[3:])
    queue.release(chains[4])
    queue.release(chains[3])
    queue.check_integrity([])


def test_slots_are_reserved_from_the_question_until_a_sequence_runs(desk: Desk) -> None:
    first, second = desk.begun(8), desk.begun(8)
    assert desk.queue.num_reserved == 2
    desk.store.complete()
    desk.queue.take(first)
    assert desk.queue.num_reserved == 1
    desk.queue.release(first)
    desk.queue.release(second)
    assert desk.queue.num_reserved == 0


def test_a_chain_that_is_released_is_not_read_on(desk: Desk) -> None:
    begun, queued = desk.begun(8), desk.begun(8)
    (read,) = desk.store.fetches
    desk.queue.release(queued)
    desk.queue.release(begun)
    assert not read.blocks
    assert not queued.reads
    assert not begun.reads
    assert len(desk.store.fetches) == 1


def test_a_read_is_awaited_until_it_is_read_or_late(desk: Desk) -> None:
    desk.queue.computing.observe(100, 1.0)
    first, queued = desk.begun(8), desk.begun(4)
    assert first.compute_s == pytest.approx(1.28)
    assert desk.queue.due_in_s == pytest.approx(1.28)
    assert first.is_awaited(0)
    desk.now_s = 1.27
    assert first.is_awaited(0)
    desk.now_s = 1.28
    assert not first.is_awaited(0)
    assert not first.is_done
    # One that was not begun has longer.
    assert queued.is_awaited(0)
    assert desk.queue.take(first) == []
    assert desk.queue.num_late == 1
    desk.queue.release(first)
    assert desk.queue.due_in_s == pytest.approx(0.64)
    desk.store.complete()
    assert not queued.is_awaited(0)
    assert desk.queue.due_in_s is None
    assert len(desk.queue.take(queued)) == 4
    assert (desk.queue.num_reads, desk.queue.num_late) == (2, 1)


def test_a_read_that_is_not_begun_in_time_is_given_up(desk: Desk) -> None:
    first, queued = desk.begun(8), desk.begun(4)
    desk.store.complete()
    # The sequence of the first one has no room.
    assert desk.queue.due_in_s == LONGEST_READ_S
    desk.now_s = LONGEST_READ_S
    assert not queued.is_awaited(0)
    assert desk.queue.take(queued) == []
    desk.queue.release(queued)
    assert (desk.queue.num_reads, desk.queue.num_late) == (1, 1)
    # Where computing takes longer, so may waiting.
    desk.queue.computing.observe(1, 1.0)
    slow = desk.begun(4)
    desk.now_s += 63.9
    assert slow.is_awaited(0)
    desk.now_s += 0.2
    assert not slow.is_awaited(0)
    desk.queue.release(slow)
    desk.queue.release(first)


def test_no_read_takes_longer_than_a_bound(desk: Desk) -> None:
    unknown = desk.begun(4)
    assert desk.queue.due_in_s == LONGEST_READ_S
    desk.queue.computing.observe(1, 100.0)
    slow = desk.begun(4)
    assert slow.compute_s == 6400.0
    desk.now_s = LONGEST_READ_S
    assert not unknown.is_awaited(0)
    assert not slow.is_awaited(0)


def test_a_read_that_is_tried_again_is_tried_by_one(desk: Desk) -> None:
    queue = desk.queue
    queue.computing.observe(SIZE, 0.1)
    slow = desk.begun(8)
    desk.now_s = 5.0
    desk.store.complete()
    queue.take(slow)
    queue.release(slow)
    assert desk.add(8) is None
    desk.now_s += RETRY_S + 1
    trial = desk.begun(8)
    assert desk.add(8) is None
    assert desk.add(8) is None
    # It was aborted: another one is tried later.
    queue.release(trial)
    assert desk.add(8) is None
    desk.now_s += 2 * RETRY_S + 1
    desk.begun(8)


def test_each_place_has_a_pace_of_its_own(desk: Desk) -> None:
    place = "slow"
    desk.store.place = lambda _contents: place  # type: ignore[method-assign]
    desk.queue.computing.observe(SIZE, 0.1)
    slow = desk.begun(8)
    desk.now_s = 5.0
    desk.store.complete()
    # What has it by now does not matter.
    place = "fast"
    desk.queue.take(slow)
    desk.queue.release(slow)
    desk.queue.release(desk.begun(8))
    place = "slow"
    assert desk.add(8) is None


class Parts:
    """A read of 40 blocks of a store that gives parts."""

    def __init__(self, desk: Desk, compute_s: float | None) -> None:
        self.desk = desk
        if compute_s is not None:
            desk.queue.computing.observe(40 * SIZE, compute_s)
        desk.store.gives_parts = True
        self.fetch = desk.begun(40)
        (self.read,) = desk.store.fetches
        self.all, self.read.blocks = self.read.blocks, []
        self.fetch.num_came = 0

    def come(self, num_blocks: int) -> None:
        self.read.blocks = self.all[: len(self.read.blocks) + num_blocks]
        self.desk.queue.note_done()

    def is_awaited_at(self, now_s: float) -> bool:
        self.desk.now_s = now_s
        return self.fetch.is_awaited(0)


def test_parts_are_awaited_as_long_as_computing_takes(desk: Desk) -> None:
    parts = Parts(desk, 40.0)
    assert parts.is_awaited_at(39.9)
    assert not parts.is_awaited_at(40.0)


def test_parts_that_come_faster_than_they_are_computed_are_awaited(desk: Desk) -> None:
    parts = Parts(desk, 40.0)
    for now_s in (39.0, 42.0, 45.0):
        assert parts.is_awaited_at(now_s)
        parts.come(4)
    assert parts.is_awaited_at(48.9)
    assert desk.queue.due_in_s == pytest.approx(0.1)
    assert not parts.is_awaited_at(49.0)
    assert len(desk.queue.take(parts.fetch)) == 12


def test_parts_that_come_slowly_are_not_awaited(desk: Desk) -> None:
    parts = Parts(desk, 40.0)
    for now_s in range(2, 40, 2):
        assert parts.is_awaited_at(now_s)
        parts.come(1)
    assert not parts.is_awaited_at(40.0)


def test_without_a_measurement_parts_are_awaited_while_they_come(desk: Desk) -> None:
    parts = Parts(desk, None)
    assert parts.is_awaited_at(SILENT_S - 0.1)
    parts.come(1)
    assert parts.is_awaited_at(2 * SILENT_S - 0.2)
    assert not parts.is_awaited_at(2 * SILENT_S)
    parts.come(1)
    assert not parts.is_awaited_at(LONGEST_READ_S)


def test_a_read_slower_than_computing_is_not_begun_until_it_is_tried_again(desk: Desk) -> None:
    queue = desk.queue
    first = desk.begun(8)
    desk.now_s = 2.0
    desk.store.complete()
    queue.take(first)
    queue.release(first)
    assert queue.wait_s == 2.0
    # Nothing is known about computing.
    second = desk.begun(1)
    queue.release(second)
    # Reading a block takes 250 ms.
    queue.computing.observe(SIZE, 0.26)
    third = desk.add(4)
    assert third is not None
    queue.release(third)
    for _ in range(20):
        queue.computing.observe(SIZE, 0.24)
    assert desk.add(4) is None
    queue.check_integrity([])
    desk.now_s += RETRY_S
    assert desk.add(4) is None
    desk.now_s += 0.1
    again = desk.add(4)
    assert again is not None
    desk.store.complete()
    queue.take(again)
    queue.release(again)
    # It was read at once: the average follows.
    assert desk.add(4) is not None


def test_only_the_time_of_reading_is_measured(desk: Desk) -> None:
    queue = desk.queue
    read = desk.begun(8)
    desk.now_s = 0.5
    desk.store.complete()
    desk.now_s = 60.0
    assert len(queue.take(read)) == 8
    assert queue.wait_s == 0.5
    at_once = desk.add(1, DictStore())
    assert at_once is not None
    desk.now_s = 90.0
    assert len(queue.take(at_once)) == 1
    assert queue.wait_s == 0.5


def test_a_result_ends_at_the_first_block_that_could_not_be_read(desk: Desk) -> None:
    ready = DictStore()
    ready.tier = "near"
    runs = [desk.run(2, ready), desk.run(3, desk.store), desk.run(2, ready)]
    for most, expected in [(None, 7), (1, 3), (0, 2)]:
        desk.store.fail_after(most)
        fetch = desk.queue.add(runs, 7 * SIZE)
        assert fetch is not None
        desk.store.complete()
        blocks = desk.queue.take(fetch)
        assert [data for data, _ in blocks] == fetch.contents[:expected]
        tiers = ["near"] * 2 + ["dict"] * 3 + ["near"] * 2
        assert [tier for _, tier in blocks] == tiers[:expected]
        desk.queue.release(fetch)
    # The second run is late.
    fetch = desk.queue.add(runs, 7 * SIZE)
    assert fetch is not None
    assert [data for data, _ in desk.queue.take(fetch)] == fetch.contents[:2]


@pytest.mark.parametrize("most", [None, 0, 1, 2])
@pytest.mark.parametrize("num_blocks", [0, 2])
def test_nothing_is_used_of_a_chain_without_its_state(
    desk: Desk, most: int | None, num_blocks: int
) -> None:
    ready = DictStore()
    runs = [desk.run(num_blocks, desk.store)] if num_blocks else []
    for store in (ready, desk.store):
        state = replace(desk.run(1, store), entry_size=50)
        desk.store.fail_after(most)
        fetch = desk.queue.add(runs, 4 * SIZE, state)
        assert fetch is not None
        assert (fetch.num_blocks, fetch.size) == (num_blocks, num_blocks + 50)
        assert len(fetch.reads) == len(runs) + 1
        desk.store.complete()
        is_whole = most in (None, 2) or (most == 1 and num_blocks < 2)
        is_whole |= store is ready and num_blocks == 0
        wanted = [*fetch.contents, *state.contents] if is_whole else []
        assert [data for data, _ in desk.queue.take(fetch)] == wanted
        desk.queue.release(fetch)


def test_a_state_takes_memory_as_its_bytes_do(desk: Desk) -> None:
    first = desk.queue.add(
        [desk.run(4, desk.store)], 4 * SIZE, replace(desk.run(1, desk.store), entry_size=5)
    )
    second = desk.begun(2)
    assert first is not None
    assert first.reads
    assert not second.reads
    desk.queue.release(first)
    assert second.reads


def test_nothing_is_used_of_what_was_dropped(desk: Desk) -> None:
    queue = desk.queue
    chains = [desk.begun(8), desk.begun(8)]
    queue.drop_all()
    assert queue.due_in_s is None
    for chain in chains:
        assert not chain.is_awaited(0)
    desk.store.complete()
    for chain in chains:
        assert queue.take(chain) == []
        queue.release(chain)
    assert (queue.num_reads, queue.num_late, queue.wait_s) == (0, 0, 0.0)
    queue.check_integrity([])


def test_an_engine_is_woken_after_the_time_was_noted() -> None:
    store, now_s = DictStore(holds_back=True), [0.0]
    store.put(StoredBlock(content=b"c", parent=b"", data=b"d"))
    tiers, woken = Tiers([store], block_bytes=1, clock=lambda: now_s[0]), list[float | None]()
    chain = tiers.fetches.add(tiers.find([b"c"]), SIZE)
    assert chain is not None
    tiers.wake_by(lambda: woken.append(chain.done_s))
    now_s[0] = 3.0
    store.complete()
    assert woken == [3.0]
