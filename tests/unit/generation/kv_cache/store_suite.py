"""The protocol of stores as tests; a class of a store inherits from ``StoreSuite``."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing

import pytest

from mlx_parallm.generation.kv_cache.stores import BlockStore, StoredBlock

#: No test but those of the limit comes near to it.
LIMIT_BYTES = 64 << 20
BLOCK_BYTES = 1000
#: STATE_BYTES: as much as many blocks.
STATE_BYTES = 50 * BLOCK_BYTES


class Chains:
    """Blocks of random bytes, in chains that may begin with another chain."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.data: dict[bytes, bytes] = {}
        self.parents: dict[bytes, bytes] = {}
        self.states: set[bytes] = set()

    def new(self, length: int, start: Sequence[bytes] = (), size: int = BLOCK_BYTES) -> list[bytes]:
        """Return the contents of a new chain: ``start``, and so many more."""
        chain = list(start)
        for _ in range(length):
            content = self._random.randbytes(32)
            self.parents[content] = chain[-1] if chain else b""
            self.data[content] = self._random.randbytes(size)
            chain.append(content)
        return chain

    def new_state(self, parent: bytes = b"", size: int = STATE_BYTES) -> bytes:
        """Return the content of a new state after a block."""
        content = self.new(1, size=size)[0]
        self.parents[content] = parent
        self.states.add(content)
        return content

    def put(self, store: BlockStore, chain: Sequence[bytes]) -> None:
        """Put blocks of a chain, in order, as the scheduler does."""
        for content in chain:
            if not store.has(content):
                store.put(
                    StoredBlock(
                        content=content,
                        parent=self.parents[content],
                        data=self.data[content],
                        is_state=content in self.states,
                    )
                )

    def bytes_of(self, chain: Sequence[bytes]) -> list[bytes]:
        return [self.data[content] for content in chain]

    def check_beginnings(self, store: BlockStore) -> int:
        """Check that what a block follows is in a store too; return how many blocks it has."""
        here = {content for content in self.data if store.find([content])}
        assert {self.parents[content] for content in here} <= here | {b""}
        return len(here)


def read(store: BlockStore, chain: Sequence[bytes]) -> list[bytes]:
    """Return what a fetch brings; wait for it by the store's call, as the engine does."""
    done = threading.Event()
    store.wake_by(done.set)
    fetch = store.fetch(chain)
    while not fetch.is_done:
        done.wait()
        done.clear()
    return [bytes(row) for row in fetch.result()]


class StoreSuite:
    """Tests of any store; a subclass overrides ``make_store``, and ``settle`` if it needs time."""

    def make_store(self, limit_bytes: int) -> BlockStore:
        """Return a new, empty store."""
        raise NotImplementedError

    def settle(self, store: BlockStore) -> None:
        """Wait until what was put is where it stays."""

    @pytest.fixture
    def store(self) -> Iterator[BlockStore]:
        with closing(self.make_store(LIMIT_BYTES)) as store:
            yield store

    @pytest.fixture
    def chains(self) -> Chains:
        return Chains()

    def test_an_empty_store_finds_nothing(self, store: BlockStore, chains: Chains) -> None:
        chain = chains.new(3)
        assert store.find(chain) == store.find([]) == 0
        assert read(store, chain) == read(store, []) == []
        assert not store.has(chain[0])
        store.use(chain)
        assert store.stats.num_blocks == store.stats.used_bytes == store.stats.read_blocks == 0
        assert not store.is_busy
        assert store.stats.off == ""

    @pytest.mark.parametrize("size", [1, BLOCK_BYTES, 300_000])
    def test_a_chain_comes_back_as_it_was(
        self, store: BlockStore, chains: Chains, size: int
    ) -> None:
        chain = chains.new(40, size=size)
        chains.put(store, chain)
        for is_settled in (False, True):
            if is_settled:
                self.settle(store)
            assert store.find(chain) == 40
            assert all(map(store.has, chain))
            assert read(store, chain) == chains.bytes_of(chain)
            assert read(store, chain[7:9]) == chains.bytes_of(chain[7:9])
            assert store.stats.num_blocks == 40

    def test_only_leading_blocks_are_found(self, store: BlockStore, chains: Chains) -> None:
        chain, other = chains.new(5), chains.new(5)
        chains.put(store, chain)
        self.settle(store)
        mixed = [*chain[:3], *other[3:], *chain[3:]]
        assert store.find(mixed) == 3
        assert read(store, mixed) == chains.bytes_of(chain[:3])
        assert store.find(other[:1] + chain) == 0
        assert read(store, other[:1] + chain) == []

    def test_chains_share_their_beginning(self, store: BlockStore, chains: Chains) -> None:
        start = chains.new(4)
        ways = [chains.new(6, start) for _ in range(3)]
        chains.put(store, ways[0])
        self.settle(store)
        chains.put(store, ways[1])
        chains.put(store, ways[2])
        self.settle(store)
        assert store.stats.num_blocks == 4 + 3 * 6
        for way in ways:
            assert store.find(way) == 10
            assert read(store, way) == chains.bytes_of(way)

    def test_a_block_that_is_here_is_not_put_twice(self, store: BlockStore, chains: Chains) -> None:
        chain = chains.new(3)
        for _ in range(3):
            for content in chain:
                store.put(
                    StoredBlock(
                        content=content,
                        parent=chains.parents[content],
                        data=chains.data[content],
                    )
                )
            self.settle(store)
        assert store.stats.num_blocks == 3
        assert read(store, chain) == chains.bytes_of(chain)

    def test_states_are_kept_beside_the_blocks_that_they_follow(
        self, store: BlockStore, chains: Chains
    ) -> None:
        start = chains.new(4)
        ways = [chains.new(3, start) for _ in range(2)]
        # Two blocks and two states follow the last block that the chains have in common.
        states = [chains.new_state(start[3]), *(chains.new_state(way[-1]) for way in ways)]
        states.append(chains.new_state(start[3], size=1))
        chains.put(store, [*ways[0], states[0], states[1], *ways[1], *states])
        for is_settled in (False, True):
            if is_settled:
                self.settle(store)
            assert [store.find([state]) for state in states] == [1] * 4
            assert [read(store, [state]) for state in states] == [
                chains.bytes_of([state]) for state in states
            ]
            assert store.stats.num_blocks == 4 + 2 * 3 + 4
            for way in ways:
                assert store.find([*way, states[1]]) == 8
                assert read(store, [*way, states[0]]) == chains.bytes_of([*way, states[0]])
        chains.put(store, longer := chains.new(5, ways[0]))
        self.settle(store)
        assert read(store, longer) == chains.bytes_of(longer)

    def test_a_state_without_blocks_is_a_whole_chain(
        self, store: BlockStore, chains: Chains
    ) -> None:
        states = [chains.new_state() for _ in range(3)]
        chains.put(store, states[:2])
        self.settle(store)
        assert [store.find([state]) for state in states] == [1, 1, 0]
        assert read(store, states[:1]) == chains.bytes_of(states[:1])
        store.clear()
        assert store.find(states[:1]) == 0

    def test_what_was_cleared_is_not_found_again(self, store: BlockStore, chains: Chains) -> None:
        old, new = chains.new(5), chains.new(5)
        chains.put(store, old[:3])
        self.settle(store)
        chains.put(store, old[3:])
        store.clear()
        assert store.find(old) == store.find(old[3:]) == 0
        assert read(store, old) == []
        assert not any(map(store.has, old))
        chains.put(store, new)
        self.settle(store)
        assert store.find(old) == 0
        assert read(store, new) == chains.bytes_of(new)
        chains.put(store, old)
        self.settle(store)
        assert read(store, old) == chains.bytes_of(old)
        assert store.stats.num_blocks == 10

    def test_a_fetch_that_is_cancelled_disturbs_no_other(
        self, store: BlockStore, chains: Chains
    ) -> None:
        chain = chains.new(30)
        chains.put(store, chain)
        self.settle(store)
        fetches = [store.fetch(chain) for _ in range(8)]
        for fetch in fetches:
            fetch.cancel()
            fetch.cancel()
        assert read(store, chain) == chains.bytes_of(chain)

    def test_a_fetch_under_way_when_blocks_go_brings_no_wrong_byte(
        self, store: BlockStore, chains: Chains
    ) -> None:
        chain = chains.new(30, size=50_000)
        chains.put(store, chain)
        self.settle(store)
        done = threading.Event()
        store.wake_by(done.set)
        fetches = [store.fetch(chain) for _ in range(3)]
        store.clear()
        for fetch in fetches:
            while not fetch.is_done:
                done.wait()
                done.clear()
            result = fetch.result()
            assert list(result) == chains.bytes_of(chain[: len(result)])

    def test_a_result_may_be_read_on_any_thread(self, store: BlockStore, chains: Chains) -> None:
        chain = chains.new(10)
        chains.put(store, chain)
        self.settle(store)
        done, results = threading.Event(), list[Sequence[bytes]]()
        store.wake_by(done.set)
        fetch = store.fetch(chain)

        def collect() -> None:
            while not fetch.is_done:
                done.wait()
                done.clear()
            results.append([bytes(row) for row in fetch.result()])

        thread = threading.Thread(target=collect)
        thread.start()
        thread.join()
        assert list(results[0]) == chains.bytes_of(chain)


class LimitedStoreSuite(StoreSuite):
    """Tests of a store that keeps so many bytes, and counts them."""

    def test_counters_say_what_was_kept_and_read(self, store: BlockStore, chains: Chains) -> None:
        chain = chains.new(6)
        chains.put(store, chain)
        self.settle(store)
        read(store, chain[:4])
        read(store, chain)
        stats = store.stats
        assert (stats.num_blocks, stats.read_blocks, stats.written_blocks) == (6, 10, 6)
        assert stats.read_bytes >= 10 * BLOCK_BYTES
        assert stats.written_bytes >= 6 * BLOCK_BYTES
        assert 6 * BLOCK_BYTES <= stats.used_bytes <= stats.limit_bytes == LIMIT_BYTES
        assert not any(stats.discarded.values())

    @pytest.mark.parametrize("seed", range(6))
    def test_the_limit_holds_and_beginnings_outlive_the_rest(
        self, chains: Chains, seed: int
    ) -> None:
        limit, size, source = 2 << 20, 20_000, random.Random(seed)
        with closing(self.make_store(limit)) as store:
            known: list[list[bytes]] = [[]]
            for _ in range(60):
                start = source.choice(known)
                chain = chains.new(
                    source.randint(1, 12), start[: source.randint(0, len(start))], size
                )
                num_here = store.find(chain)
                assert read(store, chain[:num_here]) == chains.bytes_of(chain[:num_here])
                chains.put(store, chain)
                if source.random() < 0.3:
                    chains.put(store, [chains.new_state(chain[-1], 10 * size)])
                self.settle(store)
                assert store.stats.used_bytes <= limit
                known.append(chain)
                used = source.choice(known)
                store.use(used)
                store.find(used[source.randint(0, len(used)) :])
            assert chains.check_beginnings(store) == store.stats.num_blocks
            assert store.stats.num_blocks * size > limit // 2

    def test_a_chain_in_use_outlives_others(self, chains: Chains) -> None:
        with closing(self.make_store(2 << 20)) as store:
            kept = chains.new(10, size=20_000)
            chains.put(store, kept)
            self.settle(store)
            for _ in range(40):
                store.use(kept[:6])
                assert store.find(kept[6:]) == 4
                other = chains.new(10, size=20_000)
                chains.put(store, other)
                self.settle(store)
            assert read(store, kept) == chains.bytes_of(kept)

    def test_a_state_that_is_not_used_goes_before_its_chain(self, chains: Chains) -> None:
        with closing(self.make_store(2 << 20)) as store:
            kept = chains.new(10, size=20_000)
            old, new = (chains.new_state(kept[number], 300_000) for number in (5, 9))
            chains.put(store, [*kept, old, new])
            self.settle(store)
            for _ in range(10):
                assert store.find(kept) == 10
                assert store.find([new]) == 1
                chains.put(store, chains.new(10, size=20_000))
                self.settle(store)
            assert not store.has(old)
            assert read(store, [*kept, new]) == chains.bytes_of([*kept, new])

    def test_a_state_evicts_others_and_not_what_it_follows(self, chains: Chains) -> None:
        with closing(self.make_store(2 << 20)) as store:
            for _ in range(4):
                chains.put(store, chains.new(20, size=20_000))
                self.settle(store)
            chain = chains.new(10, size=20_000)
            state = chains.new_state(chain[4], 1_500_000)
            chains.put(store, [*chain, state])
            self.settle(store)
            assert store.stats.used_bytes <= 2 << 20
            assert read(store, [*chain[:5], state]) == chains.bytes_of([*chain[:5], state])
            assert chains.check_beginnings(store) == store.stats.num_blocks

    def test_a_state_larger_than_the_limit_is_not_kept(self, chains: Chains) -> None:
        with closing(self.make_store(2 << 20)) as store:
            chain = chains.new(10, size=20_000)
            chains.put(store, [*chain, state := chains.new_state(chain[-1], 3 << 20)])
            self.settle(store)
            assert store.find([state]) == 0
            assert store.find(chain) == 10

    def test_a_state_is_not_kept_without_what_it_follows(
        self, store: BlockStore, chains: Chains
    ) -> None:
        chain = chains.new(3)
        chains.put(store, [chains.new_state(chain[-1])])
        assert store.stats.num_blocks == 0
        assert store.stats.discarded == {"orphan": 1}

    def test_an_end_that_is_put_again_is_no_newer_than_its_beginning(self, chains: Chains) -> None:
        with closing(self.make_store(2 << 20)) as store:
            kept = chains.new(20, size=20_000)
            for number in range(12):
                chains.put(store, kept)
                self.settle(store)
                # Others evict the end; the beginning is looked up again before the end is put.
                chains.put(store, chains.new(60 + number, size=20_000))
                self.settle(store)
                store.find(kept)
                chains.check_beginnings(store)

    def test_a_chain_larger_than_the_limit_keeps_its_beginning(self, chains: Chains) -> None:
        with closing(self.make_store(2 << 20)) as store:
            chain = chains.new(200, size=20_000)
            chains.put(store, chain)
            self.settle(store)
            count = store.find(chain)
            assert 0 < count < 200
            assert read(store, chain) == chains.bytes_of(chain[:count])
            assert store.stats.used_bytes <= 2 << 20

    def test_a_block_larger_than_the_limit_is_not_kept(self, chains: Chains) -> None:
        with closing(self.make_store(2 << 20)) as store:
            (small,), (large,) = chains.new(1), chains.new(1, size=3 << 20)
            chains.put(store, [small])
            self.settle(store)
            chains.put(store, [large])
            self.settle(store)
            assert store.find([large]) == 0
            assert read(store, [large]) == []
            assert store.find([small]) == 1
            assert sum(store.stats.discarded.values()) == 1
