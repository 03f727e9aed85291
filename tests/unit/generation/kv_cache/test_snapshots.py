"""Which snapshots are found, held and evicted."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.generation.kv_cache.snapshots import PASSING_SHARE, StateSnapshots

FIRST = 4


def made(snapshots: StateSnapshots, *contents: bytes, is_passing: bool = False) -> None:
    for content in contents:
        slot = snapshots.reserve()
        assert slot is not None
        snapshots.commit(slot, content, is_passing=is_passing)


def found(snapshots: StateSnapshots, *contents: bytes) -> bytes:
    return b"".join(content for content in contents if snapshots.has(content))


def test_the_least_recently_used_one_is_evicted() -> None:
    snapshots = StateSnapshots(FIRST, 3, state_bytes=10)
    made(snapshots, b"a", b"b", b"c")
    snapshots.release(snapshots.hold(b"a"))
    made(snapshots, b"d")
    assert found(snapshots, b"a", b"b", b"c", b"d") == b"acd"
    stats = snapshots.stats
    assert (stats.num_used, stats.num_captured, stats.num_evicted) == (3, 4, 1)
    assert stats.used_bytes == 30


def test_slots_follow_those_of_sequences() -> None:
    snapshots = StateSnapshots(FIRST, 2)
    assert [snapshots.reserve() for _ in range(3)] == [4, 5, None]


def test_a_held_one_is_not_evicted_and_is_freed_when_it_is_forgotten() -> None:
    snapshots = StateSnapshots(FIRST, 2)
    made(snapshots, b"a", b"b")
    slot = snapshots.hold(b"a")
    assert snapshots.hold(b"a") == slot
    made(snapshots, b"c")
    assert found(snapshots, b"a", b"b", b"c") == b"ac"
    snapshots.forget(b"a")
    assert snapshots.find(b"a") is None
    snapshots.release(slot)
    snapshots.check_integrity([slot], [])
    snapshots.release(slot)
    snapshots.check_integrity([], [])


def test_a_second_snapshot_of_a_prefix_is_dropped() -> None:
    snapshots = StateSnapshots(FIRST, 2)
    made(snapshots, b"a", b"a")
    assert snapshots.find(b"a") == FIRST
    snapshots.check_integrity([], [])


def test_passing_ones_evict_each_other_beyond_their_share() -> None:
    snapshots = StateSnapshots(FIRST, PASSING_SHARE)
    made(snapshots, *(bytes([number]) for number in range(PASSING_SHARE - 2)))
    made(snapshots, b"p", b"q", is_passing=True)
    made(snapshots, b"r", is_passing=True)
    assert found(snapshots, b"p", b"q", b"r") == b"qr"
    made(snapshots, b"z")
    assert found(snapshots, b"q", b"r", b"z") == b"rz"
    made(snapshots, b"y")
    assert found(snapshots, b"\0", b"\1", b"r", b"z", b"y") == b"\1rzy"


def test_one_that_is_found_is_passing_no_more() -> None:
    snapshots = StateSnapshots(FIRST, PASSING_SHARE)
    made(snapshots, b"s", is_passing=True)
    made(snapshots, *(bytes([number]) for number in range(PASSING_SHARE - 2)))
    snapshots.release(snapshots.hold(b"s"))
    snapshots.follow(b"s")
    made(snapshots, b"p", b"q", b"r", is_passing=True)
    assert found(snapshots, b"s", b"p", b"q", b"r") == b"sqr"


@pytest.mark.parametrize(("num_uses", "is_evicted"), [(0, False), (1, True), (2, False)])
def test_the_end_of_a_turn_goes_first_once_the_next_turn_has_ended(
    num_uses: int, *, is_evicted: bool
) -> None:
    snapshots = StateSnapshots(FIRST, PASSING_SHARE)
    made(snapshots, b"p", is_passing=True)
    made(snapshots, *(bytes([number]) for number in range(PASSING_SHARE - 2)), b"t")
    for _ in range(num_uses):
        snapshots.release(snapshots.hold(b"t"))
    snapshots.follow(b"t")
    made(snapshots, b"u")
    assert snapshots.has(b"t") == (not is_evicted)
    snapshots.follow(b"unknown")


def test_nothing_is_found_after_it_was_cleared() -> None:
    snapshots = StateSnapshots(FIRST, 3)
    made(snapshots, b"a")
    made(snapshots, b"b", is_passing=True)
    slot, reserved = snapshots.hold(b"a"), snapshots.reserve()
    assert reserved is not None
    snapshots.clear()
    assert found(snapshots, b"a", b"b") == b""
    snapshots.check_integrity([slot], [reserved])
    snapshots.release(slot)
    snapshots.commit(reserved, b"c")
    snapshots.check_integrity([], [])
    assert snapshots.stats.num_used == 1


@given(seed=st.integers(0, 2**32), num_slots=st.integers(1, 20))
@settings(max_examples=200, deadline=None)
def test_no_slot_is_lost(seed: int, num_slots: int) -> None:
    randomness = Random(seed)
    snapshots = StateSnapshots(FIRST, num_slots)
    held, reserved = list[int](), list[int]()
    contents = [bytes([number]) for number in range(12)]
    for _ in range(60):
        content = randomness.choice(contents)
        match randomness.randrange(7):
            case 0 | 1 if (slot := snapshots.reserve()) is not None:
                reserved.append(slot)
            case 2 if reserved:
                slot = reserved.pop(randomness.randrange(len(reserved)))
                snapshots.commit(slot, content, is_passing=randomness.random() < 0.5)
            case 3 if snapshots.has(content):
                held.append(snapshots.hold(content))
            case 4 if held:
                snapshots.release(held.pop(randomness.randrange(len(held))))
            case 5:
                snapshots.follow(content)
            case 6 if randomness.random() < 0.2:
                snapshots.clear()
            case _:
                pass
        snapshots.check_integrity(held, reserved)
        assert not Counter(held).keys() & set(reserved)
