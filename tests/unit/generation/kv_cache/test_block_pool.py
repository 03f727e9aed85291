"""Who holds a block, what it can be found by, and which is evicted first."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlx_parallm.generation.kv_cache.blocks import BlockPool


def pool_of_cached(*contents: bytes) -> tuple[BlockPool, list[int]]:
    """Return a pool without a free block; its blocks are cached, the first one longest."""
    pool = BlockPool(len(contents))
    blocks = allocate(pool, len(contents))
    for block, content in zip(blocks, contents, strict=True):
        pool.set_content(block, content)
    for block in blocks:
        pool.release(block)
    return pool, blocks


def allocate(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def test_every_block_can_be_owned_once_and_no_more() -> None:
    pool = BlockPool(3)
    assert sorted(allocate(pool, 3)) == [0, 1, 2]
    assert pool.num_free == 0
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []


def test_an_allocation_that_does_not_fit_takes_and_evicts_nothing() -> None:
    pool, blocks = pool_of_cached(b"a", b"b")
    assert pool.allocate(3) is None
    assert pool.num_free == 2
    assert [pool.find(b"a"), pool.find(b"b")] == blocks


def test_free_blocks_are_taken_before_any_is_evicted() -> None:
    pool = BlockPool(2)
    (block,) = allocate(pool, 1)
    pool.set_content(block, b"a")
    pool.release(block)
    allocate(pool, 1)
    assert pool.find(b"a") == block
    assert allocate(pool, 1) == [block]
    assert pool.find(b"a") is None


def test_the_least_recently_released_is_evicted_first() -> None:
    pool, (a, b, c) = pool_of_cached(b"a", b"b", b"c")
    pool.share(a)
    pool.release(a)
    assert [allocate(pool, 1), allocate(pool, 1), allocate(pool, 1)] == [[b], [c], [a]]


def test_to_look_a_block_up_is_not_to_use_it() -> None:
    pool, (a, _) = pool_of_cached(b"a", b"b")
    assert pool.find(b"a") == a
    assert allocate(pool, 1) == [a]


def test_a_shared_block_is_kept_until_its_last_owner_gives_it_up() -> None:
    pool, (a, b) = pool_of_cached(b"a", b"b")
    for _ in range(3):
        pool.share(a)
    for owners in (2, 1):
        pool.release(a)
        pool.check_integrity([owners, 0])
        assert pool.num_free == 1
    assert allocate(pool, 1) == [b]
    assert pool.allocate(1) is None
    pool.release(a)
    assert allocate(pool, 1) == [a]


def test_a_block_without_content_is_free_again_and_cannot_be_found() -> None:
    pool = BlockPool(1)
    (block,) = allocate(pool, 1)
    pool.release(block)
    pool.check_integrity([0])
    with pytest.raises(KeyError):
        pool.share(block)


def test_an_owned_block_can_be_found_and_shared() -> None:
    pool = BlockPool(1)
    (block,) = allocate(pool, 1)
    pool.set_content(block, b"a")
    assert pool.find(b"a") == block
    pool.share(block)
    pool.check_integrity([2])


def test_the_first_block_of_a_content_keeps_it() -> None:
    pool = BlockPool(2)
    first, second = allocate(pool, 2)
    pool.set_content(first, b"a")
    pool.set_content(second, b"a")
    pool.set_content(first, b"b")
    assert (pool.find(b"a"), pool.find(b"b")) == (first, None)
    pool.release(second)
    assert allocate(pool, 1) == [second], "the copy is free, not cached"
    pool.check_integrity([1, 1])


def test_a_content_can_come_back_after_its_block_was_evicted() -> None:
    pool, (a, b) = pool_of_cached(b"a", b"b")
    first, second = allocate(pool, 2)
    assert (first, second) == (a, b)
    pool.set_content(second, b"a")
    assert pool.find(b"a") == second
    pool.check_integrity([1, 1])


def test_clearing_forgets_contents_and_nothing_else() -> None:
    pool, (a, b) = pool_of_cached(b"a", b"b")
    pool.share(a)
    pool.clear_cache()
    assert (pool.find(b"a"), pool.find(b"b")) == (None, None)
    pool.check_integrity([1, 0])
    assert allocate(pool, 1) == [b]
    pool.release(a)
    assert allocate(pool, 1) == [a], "without its content it is free"


@pytest.mark.parametrize("content", [None, b"a"])
def test_a_block_without_an_owner_cannot_be_released(content: bytes | None) -> None:
    pool = BlockPool(1)
    (block,) = allocate(pool, 1)
    if content is not None:
        pool.set_content(block, content)
    pool.release(block)
    with pytest.raises(AssertionError, match="without an owner"):
        pool.release(block)
    pool.check_integrity([0])
    assert pool.num_free == 1


def test_integrity_is_missed_when_tables_and_counts_differ() -> None:
    pool = BlockPool(2)
    (block,) = allocate(pool, 1)
    pool.check_integrity([1, 0])
    for owners in ([0, 0], [2, 0], [1, 1], [0, 1]):
        with pytest.raises(AssertionError, match="reference counts"):
            pool.check_integrity(owners)
    pool.set_content(block, b"a")
    pool.check_integrity([1, 0])


def test_integrity_is_missed_when_a_block_that_nobody_owns_is_given_a_content() -> None:
    pool = BlockPool(1)
    pool.set_content(0, b"a")
    with pytest.raises(AssertionError):
        pool.check_integrity([0])


class PoolAndModel(RuleBasedStateMachine):
    """The pool against lists that are searched: free in order, cached in order of release."""

    @initialize(num_blocks=st.integers(1, 5))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.free = list(range(num_blocks))
        self.cached: list[int] = []
        self.owners: Counter[int] = Counter()
        self.contents: dict[int, bytes] = {}

    @property
    def owned(self) -> list[int]:
        return sorted(self.owners.elements())

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        expected = (self.free + self.cached)[:count]
        blocks = self.pool.allocate(count)
        if len(expected) < count:
            assert blocks is None
            return
        assert blocks == expected
        for block in expected:
            (self.free if block in self.free else self.cached).remove(block)
            self.contents.pop(block, None)
            self.owners[block] = 1

    @precondition(lambda self: self.owned or self.cached)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted({*self.owned, *self.cached})))
        self.pool.share(block)
        self.owners[block] += 1
        if block in self.cached:
            self.cached.remove(block)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.owned))
        self.pool.release(block)
        self.owners[block] -= 1
        if not self.owners[block]:
            (self.cached if block in self.contents else self.free).append(block)

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), content=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def set_content(self, data: st.DataObject, content: bytes) -> None:
        block = data.draw(st.sampled_from(self.owned))
        self.pool.set_content(block, content)
        if block not in self.contents and content not in self.contents.values():
            self.contents[block] = content

    @rule()
    def clear(self) -> None:
        self.pool.clear_cache()
        self.free += self.cached
        self.cached.clear()
        self.contents.clear()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity([self.owners[b] for b in range(self.pool.num_blocks)])
        assert self.pool.num_free == len(self.free) + len(self.cached)
        cached_blocks = {content: self.pool.find(content) for content in (b"a", b"b", b"c", b"d")}
        known = {content: block for block, content in self.contents.items()}
        assert cached_blocks == {content: known.get(content) for content in cached_blocks}


TestPoolAndModel = PoolAndModel.TestCase
TestPoolAndModel.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
