"""Sequences get blocks that hold their own tokens: found, grown, forked, shared and freed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.generation.kv_cache.blocks import BlockTable
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.kv_cache.snapshots import StateSnapshots

SIZE = 4
TEXT = tuple(range(100, 140))


def compute(
    manager: KVCacheManager, token_ids: Sequence[int], salt: bytes = b"", *, use_cache: bool = True
) -> BlockTable:
    """Return the table of a sequence whose tokens have all been computed."""
    table = manager.new_table(token_ids, salt, use_cache=use_cache)
    assert manager.grow(table, len(token_ids))
    manager.commit(table, token_ids, len(token_ids))
    return table


def hits(manager: KVCacheManager, token_ids: Sequence[int], salt: bytes = b"") -> list[int]:
    """Return the cached blocks that a new sequence would begin with; none is held after."""
    table = manager.new_table(token_ids, salt, use_cache=True)
    blocks = list(table.blocks)
    manager.free(table)
    return blocks


@given(st.integers(0, 200), st.integers(1, 20))
def test_blocks_for_is_the_least_number_that_holds_the_tokens(num_tokens: int, size: int) -> None:
    blocks = KVCacheManager(1, size).blocks_for(num_tokens)
    assert (blocks - 1) * size < num_tokens <= blocks * size or num_tokens == blocks == 0


def test_growth_adds_only_what_is_missing() -> None:
    manager = KVCacheManager(4, SIZE)
    table = manager.new_table(TEXT, b"", use_cache=True)
    assert manager.grow(table, 0)
    assert table.blocks == []
    assert manager.grow(table, 5)
    before = list(table.blocks)
    assert manager.grow(table, 8)
    assert manager.grow(table, 1)
    assert table.blocks == before
    assert manager.grow(table, 9)
    assert table.blocks[:2] == before
    assert len(table.blocks) == 3
    assert manager.usage == pytest.approx(0.75)


def test_growth_that_does_not_fit_changes_nothing() -> None:
    manager = KVCacheManager(3, SIZE)
    table, other = (manager.new_table(TEXT, b"", use_cache=True) for _ in range(2))
    assert manager.grow(table, 5)
    assert not manager.grow(other, 5)
    assert not manager.grow(table, 13)
    assert (len(table.blocks), other.blocks, manager.num_free) == (2, [], 1)
    manager.check_integrity([table, other])


@pytest.mark.parametrize(
    ("length", "expected"), [(1, 0), (3, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)]
)
def test_a_prefix_is_found_by_whole_blocks_and_one_token_is_left(
    length: int, expected: int
) -> None:
    manager = KVCacheManager(8, SIZE)
    table = compute(manager, TEXT[:16])
    reused = manager.new_table(TEXT[:length], b"", use_cache=True)
    assert reused.blocks == table.blocks[:expected]
    assert reused.hashes == table.hashes[:expected]
    manager.check_integrity([table, reused])


def test_only_computed_full_blocks_can_be_found() -> None:
    manager = KVCacheManager(8, SIZE)
    table = manager.new_table(TEXT[:16], b"", use_cache=True)
    manager.grow(table, 16)
    assert hits(manager, TEXT[:16]) == []
    manager.commit(table, TEXT[:16], 3)
    assert hits(manager, TEXT[:16]) == []
    manager.commit(table, TEXT[:16], 11)
    assert hits(manager, TEXT[:16]) == table.blocks[:2]


def test_a_commit_counts_the_tokens_that_the_cache_did_not_have() -> None:
    manager = KVCacheManager(10, SIZE)
    first, second = (manager.new_table(TEXT, b"", use_cache=True) for _ in range(2))
    assert manager.grow(first, 11)
    assert manager.grow(second, 14)
    assert manager.commit(first, TEXT, 7) == SIZE
    assert manager.commit(first, TEXT, 11) == SIZE
    # Two that compute the same at once put it there once.
    assert manager.commit(second, TEXT, 14) == SIZE
    manager.withhold(second)
    assert manager.commit(second, TEXT, 16) == 0


def test_the_same_tokens_after_another_beginning_are_another_block() -> None:
    manager = KVCacheManager(8, SIZE)
    table = compute(manager, (*TEXT[:4], *TEXT[8:12]))
    other = (*TEXT[4:8], *TEXT[8:12], 1)
    assert hits(manager, other) == []
    assert hits(manager, (*TEXT[8:12], 1)) == []
    assert hits(manager, (*TEXT[:4], 7, *TEXT[8:12])) == table.blocks[:1]


def test_salts_keep_equal_prompts_apart() -> None:
    manager = KVCacheManager(8, SIZE)
    mine = compute(manager, TEXT[:8], b"me")
    yours = compute(manager, TEXT[:8], b"you")
    assert not set(mine.blocks) & set(yours.blocks)
    assert hits(manager, TEXT[:9], b"me") == mine.blocks
    assert hits(manager, TEXT[:9], b"you") == yours.blocks
    assert hits(manager, TEXT[:9]) == []


def test_without_prefix_caching_nothing_is_found_or_kept() -> None:
    manager = KVCacheManager(4, SIZE, enable_prefix_caching=False)
    table = compute(manager, TEXT[:8])
    assert hits(manager, TEXT[:9]) == []
    manager.free(table)
    assert hits(manager, TEXT[:9]) == []
    assert (manager.num_free, manager.usage) == (4, 0)


def test_who_does_not_want_the_cache_computes_for_it_all_the_same() -> None:
    manager = KVCacheManager(8, SIZE)
    first = compute(manager, TEXT[:8])
    second = compute(manager, TEXT[:8], use_cache=False)
    assert not set(first.blocks) & set(second.blocks)
    manager.free(first)
    third = compute(manager, TEXT[8:16], use_cache=False)
    assert len(hits(manager, TEXT[:9])) == 2
    assert hits(manager, (*TEXT[8:16], 1)) == third.blocks


def test_shared_blocks_outlive_the_sequence_that_computed_them() -> None:
    manager = KVCacheManager(4, SIZE)
    first = compute(manager, TEXT[:8])
    shared = list(first.blocks)
    second = compute(manager, TEXT[:9])
    assert second.blocks[:2] == shared
    manager.free(first)
    manager.check_integrity([second])
    assert manager.num_free == 1
    third = manager.new_table(TEXT[20:], b"", use_cache=True)
    assert manager.grow(third, 4)
    assert not manager.grow(third, 8)
    manager.free(second)
    manager.free(third)
    manager.check_integrity([])
    assert manager.num_free == 4


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    manager = KVCacheManager(3, SIZE)
    table = compute(manager, TEXT[:12])
    blocks = list(table.blocks)
    manager.free(table)
    for left in (2, 1, 0):
        other = manager.new_table((0,), b"", use_cache=True)
        assert manager.grow(other, 4 * (3 - left))
        assert hits(manager, TEXT[:13]) == blocks[:left]
        manager.free(other)


def test_the_prompt_that_was_used_last_is_evicted_last() -> None:
    manager = KVCacheManager(4, SIZE)
    for start in (0, 8):
        manager.free(compute(manager, TEXT[start : start + 8]))
    assert len(hits(manager, TEXT[:9])) == 2
    other = manager.new_table((0,), b"", use_cache=True)
    assert manager.grow(other, 8)
    assert len(hits(manager, TEXT[:9])) == 2
    assert hits(manager, TEXT[8:17]) == []


def test_a_freed_table_holds_nothing_and_can_be_freed_again() -> None:
    manager = KVCacheManager(4, SIZE)
    table = compute(manager, TEXT[:8])
    assert len(table.as_tuple()) == 2
    manager.free(table)
    assert (table.as_tuple(), table.parent) == ((), b"")
    manager.free(table)
    manager.check_integrity([table])
    manager.grow(table, 4)
    manager.commit(table, TEXT[20:24], 4)
    assert hits(manager, TEXT[20:25]) == table.blocks


def test_the_tuple_of_a_table_is_made_anew_only_when_blocks_are_added() -> None:
    manager = KVCacheManager(4, SIZE)
    table = compute(manager, TEXT[:5])
    ids = table.as_tuple()
    manager.grow(table, 8)
    assert table.as_tuple() is ids
    manager.grow(table, 9)
    assert table.as_tuple() == tuple(table.blocks) != ids


@pytest.mark.parametrize(("num_tokens", "own"), [(0, 0), (3, 1), (4, 0), (7, 1), (8, 0), (9, 1)])
def test_a_fork_shares_full_blocks_and_copies_the_partial_one(num_tokens: int, own: int) -> None:
    manager = KVCacheManager(8, SIZE)
    table = compute(manager, TEXT[:10])
    before = list(table.blocks)
    forked = manager.fork(table, num_tokens)
    assert forked is not None
    child, copy = forked
    num_full = num_tokens // SIZE
    assert child.blocks[:num_full] == before[:num_full]
    assert len(child.blocks) == num_full + own
    assert child.hashes == table.hashes[:num_full]
    if own:
        assert copy == (before[num_full], child.blocks[num_full])
        assert child.blocks[num_full] not in before
    else:
        assert copy is None
    assert table.blocks == before
    manager.check_integrity([table, child])


def test_forks_write_to_blocks_of_their_own_and_are_found_by_what_they_wrote() -> None:
    manager = KVCacheManager(8, SIZE)
    table = compute(manager, TEXT[:6], b"salt")
    forked = manager.fork(table, 6)
    assert forked is not None
    child, _ = forked
    texts = {1: (*TEXT[:6], 1, 1), 2: (*TEXT[:6], 2, 2)}
    for branch, text in ((table, texts[1]), (child, texts[2])):
        manager.grow(branch, 8)
        manager.commit(branch, text, 8)
    assert hits(manager, (*texts[1], 0), b"salt") == table.blocks
    assert hits(manager, (*texts[2], 0), b"salt") == child.blocks
    assert table.blocks[0] == child.blocks[0]
    assert hits(manager, (*texts[2], 0)) == []
    manager.free(table)
    manager.check_integrity([child])
    assert hits(manager, (*texts[2], 0), b"salt") == child.blocks


def test_a_fork_that_does_not_fit_changes_nothing() -> None:
    manager = KVCacheManager(2, SIZE)
    table = compute(manager, TEXT[:6])
    assert manager.fork(table, 6) is None
    manager.check_integrity([table])
    forked = manager.fork(table, 4)
    assert forked is not None
    manager.check_integrity([table, forked[0]])


def test_a_fork_of_more_than_there_is_takes_no_block() -> None:
    manager = KVCacheManager(4, SIZE)
    table = compute(manager, TEXT[:4])
    for num_tokens in (5, 8):
        with pytest.raises(AssertionError, match="without a block"):
            manager.fork(table, num_tokens)
    manager.check_integrity([table])


def test_what_is_computed_over_forgotten_blocks_is_not_found_later() -> None:
    manager = KVCacheManager(8, SIZE)
    old = compute(manager, TEXT[:4])
    before = manager.fork(old, 4)
    manager.reset_prefix_cache()
    after = manager.fork(old, 4)
    assert before is not None
    assert after is not None
    running = [old, before[0], after[0]]
    texts = [(*TEXT[:4], *TEXT[start : start + 4]) for start in (10, 20, 30)]
    for table, text in zip(running, texts, strict=True):
        manager.grow(table, 8)
        manager.commit(table, text, 8)
    new = compute(manager, TEXT[:4])
    assert not set(new.blocks) & set(old.blocks)
    for text in texts:
        assert hits(manager, (*text, 0)) == new.blocks, "the second block follows an old one"
    manager.check_integrity([*running, new])


def test_a_reset_forgets_and_frees_but_takes_nothing_from_those_that_run() -> None:
    manager = KVCacheManager(4, SIZE)
    running = compute(manager, TEXT[:4])
    manager.free(compute(manager, TEXT[4:12]))
    blocks = list(running.blocks)
    manager.reset_prefix_cache()
    assert hits(manager, TEXT[:5]) == hits(manager, TEXT[4:13]) == []
    assert running.blocks == blocks
    assert manager.num_free == 3
    manager.check_integrity([running])


def test_integrity_is_missed_when_a_table_is_lost_or_holds_a_block_twice() -> None:
    manager = KVCacheManager(4, SIZE)
    table = compute(manager, TEXT[:8])
    with pytest.raises(AssertionError, match="reference counts"):
        manager.check_integrity([])
    with pytest.raises(AssertionError, match="reference counts"):
        manager.check_integrity([table, table])
    table.append(table.blocks[:1])
    with pytest.raises(AssertionError, match="twice"):
        manager.check_integrity([table])


@pytest.mark.parametrize("has_kv", [True, False])
@pytest.mark.parametrize("num_tokens", [5, 7, 8])
def test_a_preempted_sequence_finds_its_last_block_again(num_tokens: int, *, has_kv: bool) -> None:
    snapshots = StateSnapshots(0, 2)
    kv = KVCacheManager(9, 4, snapshots=snapshots, has_kv=has_kv)
    tokens = list(range(num_tokens + 1))
    table = kv.new_table(tokens, b"salt", use_cache=True)
    assert kv.grow(table, num_tokens)
    # The last token is still computed by a step in flight.
    kv.commit(table, tokens, num_tokens - 1)
    tail = kv.leave_tail(table, tokens, num_tokens)
    assert tail is not None
    assert not tail.is_whole
    blocks = list(table.blocks)
    kv.free(table)
    slot = snapshots.reserve()
    assert slot is not None
    snapshots.commit(slot, tail.content)
    other = kv.new_table(tokens, b"other", use_cache=True, tail=tail)
    assert other.num_cached == 0
    again = kv.new_table(tokens, b"salt", use_cache=True, tail=tail)
    assert (again.num_cached, again.snapshot) == (num_tokens, slot)
    assert not has_kv or again.blocks == blocks
    kv.claim_tail(again)
    # Others do not find what it is going to change.
    assert kv.new_table(tokens, b"salt", use_cache=True, tail=tail).num_cached == 0
    assert kv.take_snapshot(again) == slot
    snapshots.check_integrity([], [])


def test_a_snapshot_keeps_no_table_alive() -> None:
    """Check that the images of a prompt are freed, although the state after it is kept."""
    manager = KVCacheManager(4, 2, snapshots=StateSnapshots(1, 2))
    table = manager.new_table([1, 2, 3], b"", use_cache=True)
    slot = manager.reserve_snapshot()
    assert slot is not None
    manager.commit_snapshot(slot, table, b"content", is_passing=False)
    manager.free(table)
    is_alive = weakref.ref(table)
    del table
    assert is_alive() is None
