"""Stores in memory, by the protocol's suite and by their own rules."""

from __future__ import annotations

from mlx_parallm.generation.kv_cache.host_store import HostStore
from mlx_parallm.generation.kv_cache.stores import BlockStore, StoredBlock
from tests.dict_store import DictStore
from tests.unit.generation.kv_cache.store_suite import Chains, LimitedStoreSuite, StoreSuite


class TestDictStore(StoreSuite):
    def make_store(self, limit_bytes: int) -> BlockStore:
        return DictStore()


class TestHostStore(LimitedStoreSuite):
    def make_store(self, limit_bytes: int) -> BlockStore:
        return HostStore(limit_bytes)


def test_the_least_recently_used_chain_goes_first_from_its_end() -> None:
    chains = Chains()
    store = HostStore(8 * 1000)
    first, second = chains.new(4), chains.new(4)
    chains.put(store, first)
    chains.put(store, second)
    assert store.find(first) == 4
    for left in (3, 2, 1, 0):
        chains.put(store, chains.new(1))
        assert len([content for content in second if store.has(content)]) == left
        assert store.has(second[0]) == (left > 0)
    assert store.find(first) == 4


def test_bytes_are_counted_once_and_not_after_a_clear() -> None:
    chains = Chains()
    store = HostStore(8 * 1000)
    chain = chains.new(3)
    for _ in range(2):
        for content in chain:
            store.put(
                StoredBlock(
                    content=content, parent=chains.parents[content], data=chains.data[content]
                )
            )
        assert store.stats.used_bytes == 3 * 1000
    store.clear()
    assert store.stats.used_bytes == 0


def test_a_block_whose_beginning_is_gone_is_not_kept() -> None:
    chains = Chains()
    store = HostStore(8 * 1000)
    chain = chains.new(3)
    chains.put(store, chain[1:])
    assert store.stats.num_blocks == 0
    assert store.stats.discarded == {"orphan": 2}


def test_fetches_can_be_held_back_and_fail() -> None:
    chains, woken = Chains(), list[bool]()
    store = DictStore(holds_back=True)
    store.wake_by(lambda: woken.append(True))
    chain = chains.new(3)
    chains.put(store, chain)
    fetch = store.fetch(chain)
    store.fail_after(1)
    failed = store.fetch(chain)
    assert not fetch.is_done
    assert not failed.is_done
    store.complete()
    assert woken == [True]
    assert fetch.is_done
    assert list(fetch.result()) == chains.bytes_of(chain)
    assert list(failed.result()) == chains.bytes_of(chain[:1])
