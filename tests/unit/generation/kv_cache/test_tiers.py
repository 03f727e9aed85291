"""Several stores below one pool: who has a block, who gets it, and what is too short for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mlx_parallm.config import CacheConfig
from mlx_parallm.generation.kv_cache.blocks import BlockTable
from mlx_parallm.generation.kv_cache.fetches import Run
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.kv_cache.opening import open_tiers
from mlx_parallm.generation.kv_cache.saves import Save
from mlx_parallm.generation.kv_cache.stores import StoredBlock
from mlx_parallm.generation.kv_cache.tiers import ArrivedBlock, Tiers
from mlx_parallm.types.content import PendingContent
from mlx_parallm.types.step import Moves
from tests.dict_store import DictStore

SIZE = 4
CHAIN = [b"%d" % number for number in range(6)]
TOKENS = list(range(100, 160))


class NamedStore(DictStore):
    """A store whose tier has a name, and that may be busy or refuse blocks."""

    def __init__(self, tier: str) -> None:
        super().__init__()
        self.tier = tier
        self.busy = self.is_closed = False
        self.room = math.inf
        self.refuses = False
        self.used: list[Sequence[bytes]] = []
        self.puts: list[StoredBlock] = []

    @property
    def is_busy(self) -> bool:
        return self.busy

    @property
    def room_bytes(self) -> float:
        return self.room

    def has(self, content: bytes) -> bool:
        return self.refuses or super().has(content)

    def put(self, block: StoredBlock) -> None:
        self.puts.append(block)
        super().put(block)

    def use(self, contents: Sequence[bytes]) -> None:
        self.used.append(list(contents))

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Two:
    """Two stores, nearest first."""

    near: NamedStore = field(default_factory=lambda: NamedStore("near"))
    far: NamedStore = field(default_factory=lambda: NamedStore("far"))

    def tiers(self, **settings: object) -> Tiers:
        return Tiers([self.near, self.far], block_bytes=1, **settings)  # type: ignore[arg-type]


def save(tiers: Tiers, content: bytes, parent: bytes = b"", *, is_drafted: bool = False) -> None:
    """Queue a block and have it read."""
    tiers.saves.add(Save(0, content, parent, is_drafted=is_drafted))
    assert [each.content for each in tiers.saves.take(1)] == [content]
    tiers.put(content, b"bytes of " + content)


@pytest.mark.parametrize(
    ("near", "far", "expected"),
    [
        ([], [], []),
        ([], [0, 1, 2], [("far", 3)]),
        ([0, 1], [0, 1, 2], [("near", 2), ("far", 1)]),
        ([0, 3, 4], [0, 1, 2, 5], [("near", 1), ("far", 2), ("near", 2), ("far", 1)]),
        ([0, 2], [3], [("near", 1)]),
        ([1], [2], []),
    ],
)
def test_a_chain_is_found_over_all_stores_nearest_first(
    near: list[int], far: list[int], expected: list[tuple[str, int]]
) -> None:
    two = Two()
    for store, numbers in ((two.near, near), (two.far, far)):
        store.blocks.update((CHAIN[number], b"") for number in numbers)
    runs = two.tiers().find(CHAIN)
    assert [(run.store.tier, len(run.contents)) for run in runs] == expected
    contents = [content for run in runs for content in run.contents]
    assert contents == CHAIN[: len(contents)]


def test_each_store_gets_what_it_lacks() -> None:
    two = Two()
    tiers = two.tiers()
    two.near.blocks[b"a"] = b"here"
    assert tiers.lacks(b"a")
    save(tiers, b"a", b"before")
    assert two.near.blocks[b"a"] == b"here"
    (block,) = two.far.puts
    assert block == StoredBlock(content=b"a", parent=b"before", data=b"bytes of a")
    assert not tiers.lacks(b"a")
    # A store may not want a block that it has not.
    two.near.refuses = two.far.refuses = True
    assert not tiers.lacks(b"b")
    two.near.refuses = False
    assert tiers.lacks(b"b")
    save(tiers, b"b")
    assert two.near.blocks.keys() == {b"a", b"b"}
    assert two.far.blocks.keys() == {b"a"}


def test_a_block_that_waits_to_be_saved_is_not_lacked() -> None:
    tiers = Two().tiers()
    tiers.saves.add(Save(0, b"a", b""))
    assert not tiers.lacks(b"a")
    tiers.saves.take(1)
    assert not tiers.lacks(b"a")


def test_what_no_save_waits_for_is_not_kept() -> None:
    two = Two()
    tiers = two.tiers()
    tiers.saves.add(Save(0, b"a", b""))
    tiers.saves.take(1)
    tiers.clear()
    tiers.put(b"a", b"of before")
    assert not two.near.puts
    assert not two.far.puts


def test_a_busy_store_makes_all_wait_and_all_are_told() -> None:
    two = Two()
    tiers = two.tiers()
    assert not tiers.is_busy
    two.far.busy = True
    assert tiers.is_busy
    tiers.use([b"a"])
    assert two.near.used == two.far.used == [[b"a"]]
    two.near.blocks[b"a"] = two.far.blocks[b"b"] = b""
    tiers.clear()
    assert not two.near.blocks
    assert not two.far.blocks
    tiers.close()
    assert two.near.is_closed
    assert two.far.is_closed


def test_no_more_is_saved_at_once_than_every_store_has_room_for() -> None:
    two = Two()
    tiers = two.tiers()
    assert tiers.room == math.inf
    two.near.room, two.far.room = 9, 4
    assert tiers.room == 4
    for number in range(6):
        tiers.saves.add(Save(number, bytes([number]), b""))
    tiers.saves.take(3)
    assert tiers.room == 1
    tiers.put(bytes([0]), b"0")
    assert tiers.room == 2
    two.near.busy = True
    assert tiers.room == 0


def test_a_drafted_block_says_so_in_its_last_byte() -> None:
    two = Two()
    draft = PendingContent()
    tiers = two.tiers(draft=draft)
    assert tiers.salt(b"salt") is None
    draft.digest = "one"
    salted = tiers.salt(b"salt")
    assert salted not in (None, b"salt", tiers.salt(b"other"))
    assert tiers.salt(None) is None
    draft.digest = "two"
    assert tiers.salt(b"salt") not in (None, salted)
    assert two.tiers().salt(b"salt") == b"salt"
    save(tiers, b"a", is_drafted=True)
    save(tiers, b"b", b"a")
    chain = tiers.fetches.add(tiers.find([b"a", b"b"]), 2 * SIZE)
    assert chain is not None
    arrived = tiers.take(chain)
    assert [(each.data, each.is_drafted) for each in arrived] == [
        (b"bytes of a", True),
        (b"bytes of b", False),
    ]
    tiers.fetches.release(chain)


def test_a_state_is_found_nearest_first_and_comes_behind_its_chain() -> None:
    two = Two()
    draft = PendingContent("draft")
    tiers = two.tiers(draft=draft, state_bytes=10)
    assert tiers.state_size == 10
    save(tiers, b"a", is_drafted=True)
    tiers.saves.add(Save(3, b"state", b"a", is_state=True, size=10))
    tiers.saves.take(1)
    tiers.put(b"state", b"bytes of a state")
    assert [block.is_state for block in two.far.puts] == [False, True]
    assert two.far.blocks[b"state"] == b"bytes of a state", "a state has no draft model's KV"
    state = tiers.find_state(b"state")
    assert state == Run(two.near, [b"state"], 10)
    two.near.blocks.clear()
    state = tiers.find_state(b"state")
    assert state is not None
    assert state.store is two.far
    assert tiers.find_state(b"other") is None
    fetch = tiers.fetches.add(tiers.find([b"a"]), SIZE, state)
    assert fetch is not None
    assert (fetch.num_blocks, fetch.size, fetch.contents) == (1, 11, [b"a"])
    assert tiers.take(fetch) == [
        ArrivedBlock(b"bytes of a", True, "far"),
        ArrivedBlock(b"bytes of a state", False, "far", is_state=True),
    ]
    tiers.fetches.release(fetch)


def test_hits_and_saves_are_counted_by_tier() -> None:
    two = Two()
    tiers = two.tiers()
    tiers.count_hit("far", 4)
    tiers.count_hit("far", 4)
    tiers.saves.add(Save(0, b"a", b""))
    stats = tiers.stats()
    assert [(each.tier, each.hit_tokens) for each in stats.tiers] == [("near", 0), ("far", 8)]
    assert stats.num_unsaved == 1


class Pool:
    """A pool over one store."""

    def __init__(self, *, min_saved: int = 3, min_fetched: int = 2) -> None:
        self.store = NamedStore("store")
        self.tiers = Tiers(
            [self.store], block_bytes=1, min_saved=min_saved, min_fetched=min_fetched
        )
        self.kv = KVCacheManager(20, SIZE, tiers=self.tiers)

    def compute(self, num_tokens: int, salt: bytes = b"") -> BlockTable:
        """Return a table whose tokens were computed."""
        table = self.kv.new_table(TOKENS, salt, use_cache=True, lasting_salt=b"lasting" + salt)
        assert self.kv.grow(table, num_tokens)
        self.kv.commit(table, TOKENS, num_tokens)
        return table

    def save_all(self) -> None:
        for save in self.tiers.saves.take(99):
            self.tiers.put(save.content, save.content)

    def find(self, num_tokens: int) -> int:
        """Return how many blocks of a new sequence's prompt the store has."""
        table = self.kv.new_table([], b"", use_cache=False, lasting_salt=b"lasting")
        assert self.kv.stored is not None
        chain = self.kv.stored.find(table, TOKENS[:num_tokens])
        return 0 if chain is None else len(chain.contents)


def test_blocks_that_others_have_asked_for_are_saved_with_their_chain() -> None:
    pool = Pool()
    table = pool.compute(4 * SIZE)
    assert table.lasting_root is not None
    contents = [table.lasting_root + link for link in table.hashes]
    for block, content in list(zip(table.blocks, contents, strict=True))[1:3]:
        pool.tiers.saves.add(Save(block, content, b"", is_kept=False))
    pool.kv.free(table)
    pool.save_all()
    assert [block.content for block in pool.store.puts] == contents
    assert [block.parent for block in pool.store.puts] == [b"", *contents[:-1]]


def test_a_busy_store_does_not_keep_others_from_what_they_ask_for() -> None:
    two = Two()
    tiers = two.tiers()
    two.near.room = 0
    for number in (1, 2):
        tiers.saves.add(Save(number, b"%d" % number, b"", is_kept=number == 1))
    assert tiers.can_save
    assert tiers.add_saves(Moves()).saved == ((2, b"2"),)
    two.near.busy = True
    assert tiers.can_save
    tiers.put(b"2", b"bytes")
    assert not tiers.can_save
    two.near.busy = False
    two.near.room = 1
    assert tiers.can_save


def test_short_chains_are_neither_saved_nor_read() -> None:
    pool = Pool()
    pool.kv.free(pool.compute(2 * SIZE + 3))
    assert len(pool.tiers.saves) == 0
    pool.kv.free(pool.compute(3 * SIZE))
    assert len(pool.tiers.saves) == 3
    pool.save_all()
    assert [block.parent for block in pool.store.puts] == [
        b"",
        *[block.content for block in pool.store.puts[:-1]],
    ]
    assert [pool.find(num) for num in (SIZE + 1, 2 * SIZE, 2 * SIZE + 1, 99)] == [0, 0, 2, 3]
    pool.store.blocks.popitem()
    pool.store.blocks.popitem()
    assert pool.find(99) == 0


def test_a_chain_is_used_from_its_beginning() -> None:
    pool = Pool()
    pool.kv.free(pool.compute(4 * SIZE))
    pool.save_all()
    pool.store.used.clear()
    table = pool.kv.new_table(TOKENS[: 2 * SIZE + 1], b"", use_cache=True, lasting_salt=b"lasting")
    assert len(table.blocks) == 2
    assert pool.kv.stored is not None
    stored = pool.kv.stored.find(table, TOKENS)
    chain = [block.content for block in pool.store.puts]
    assert stored is not None
    assert stored.contents == chain[2:]
    assert stored.num_tokens == 2 * SIZE
    assert pool.store.used == [chain[:2]]
    pool.kv.free(table)


def test_an_ended_chain_counts_as_used() -> None:
    pool = Pool()
    for _ in range(2):
        pool.kv.free(pool.compute(4 * SIZE))
        pool.save_all()
    chain = [block.content for block in pool.store.puts]
    assert pool.store.used == [chain, chain]


def test_a_fork_saves_what_it_shares_as_its_origin_does() -> None:
    pool = Pool()
    table = pool.compute(4 * SIZE)
    forked = pool.kv.fork(table, 4 * SIZE)
    assert forked is not None
    child, _ = forked
    pool.kv.free(child)
    assert len(pool.tiers.saves) == 4
    assert table.lasting_root is not None
    chain = [table.lasting_root + link for link in table.hashes]
    assert all(content in pool.tiers.saves for content in chain)
    pool.kv.free(table)


def test_a_reset_of_the_pool_forgets_what_was_to_be_saved() -> None:
    pool = Pool()
    table = pool.compute(4 * SIZE)
    pool.kv.free(pool.compute(4 * SIZE, b"other"))
    pool.kv.reset_prefix_cache()
    assert len(pool.tiers.saves) == 0
    # What follows was computed before, at least in part.
    assert pool.kv.grow(table, 6 * SIZE)
    pool.kv.commit(table, TOKENS, 6 * SIZE)
    pool.kv.free(table)
    assert len(pool.tiers.saves) == 0


def test_blocks_are_saved_once_under_one_root() -> None:
    pool = Pool()
    tables = [pool.compute(4 * SIZE), pool.compute(5 * SIZE), pool.compute(4 * SIZE, b"other")]
    for table in tables:
        pool.kv.free(table)
    assert len(pool.tiers.saves) == 5 + 4
    pool.save_all()
    pool.kv.free(pool.compute(5 * SIZE))
    assert len(pool.tiers.saves) == 0
    # A content is its root and a hash of tokens, which is the same under each root.
    roots = {content[:16] for content in pool.store.blocks}
    links = {content[16:] for content in pool.store.blocks}
    assert (len(roots), len(links)) == (2, 5)


def test_blocks_without_a_lasting_content_stay_in_the_pool() -> None:
    pool = Pool()
    table = pool.kv.new_table(TOKENS, b"", use_cache=True)
    assert pool.kv.grow(table, 20)
    pool.kv.commit(table, TOKENS, 20)
    assert pool.kv.stored is not None
    assert pool.kv.stored.find(table, TOKENS) is None
    pool.kv.free(table)
    assert len(pool.tiers.saves) == 0


def test_a_withheld_table_saves_what_it_computed_before() -> None:
    pool = Pool()
    table = pool.compute(4 * SIZE)
    pool.kv.withhold(table)
    assert pool.kv.grow(table, 8 * SIZE)
    pool.kv.commit(table, TOKENS, 8 * SIZE)
    pool.kv.free(table)
    assert len(pool.tiers.saves) == 4


def test_blocks_are_read_before_they_are_owned_anew() -> None:
    pool = Pool()
    pool.kv.free(pool.compute(12 * SIZE))
    table = pool.kv.new_table([], b"", use_cache=False)
    assert pool.kv.grow(table, 11 * SIZE)
    # 8 blocks were free.
    taken = {save.place for save in pool.tiers.saves.take(0)}
    assert taken == set(table.blocks[8:])
    assert len(taken) == 3
    pool.kv.free(table)


def test_a_forked_table_evicts_as_a_growing_one_does() -> None:
    pool = Pool()
    pool.kv.free(pool.compute(12 * SIZE))
    table = pool.kv.new_table([], b"", use_cache=False)
    assert pool.kv.grow(table, 8 * SIZE)
    forked = pool.kv.fork(table, 7 * SIZE + 1)
    assert forked is not None
    child, copied = forked
    assert copied is not None
    assert [save.place for save in pool.tiers.saves.take(0)] == [copied[1]]
    pool.kv.free(child)
    pool.kv.free(table)


def test_a_borrowed_block_is_given_up() -> None:
    pool = Pool()
    pool.kv.free(pool.compute(20 * SIZE - 20))
    table = pool.kv.new_table([], b"", use_cache=False)
    assert pool.kv.grow(table, 5 * SIZE)
    assert len(pool.tiers.saves) == 15
    with pool.kv.borrowed_block() as block:
        assert block is not None
        assert len(pool.tiers.saves) == 14
        assert block not in {save.place for save in pool.tiers.saves.take(99)}
    pool.kv.free(table)


@pytest.mark.parametrize(
    ("state_bytes", "is_told"), [(0, False), (1 << 20, False), (17 << 20, True)]
)
def test_a_place_that_holds_no_state_is_told_at_the_start(
    state_bytes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_told: bool
) -> None:
    tiers = open_tiers(
        CacheConfig(kv_disk=tmp_path, kv_disk_bytes=16 << 20),
        owner="ab" * 32,
        block_bytes=1000,
        state_bytes=state_bytes,
        num_models=1,
        runs_ahead=False,
    )
    assert tiers is not None
    tiers.close()
    said = "--kv-disk-bytes: 16 MiB for a model do not hold its state, which takes 17 MiB"
    assert (said in caplog.text) is is_told
