"""Whatever sequences do with their blocks, each reads back what it would have written alone."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlx_parallm.generation.kv_cache.blocks import BlockTable
from mlx_parallm.generation.kv_cache.manager import KVCacheManager

SIZE = 4


@dataclass(eq=False)
class Running:
    """A sequence, and how much of it has been computed. ``weights``: those it began with."""

    token_ids: tuple[int, ...]
    salt: bytes
    weights: int
    table: BlockTable
    num_computed: int


#: What a token's KV is made of: salt, weights, and all tokens up to it.
Content = tuple[bytes, int, tuple[int, ...]]


class ManagerAndBlocks(RuleBasedStateMachine):
    """Writes into simulated blocks; every sequence must read back what it would have written."""

    @initialize(num_blocks=st.integers(3, 10), caching=st.booleans())
    def start(self, num_blocks: int, caching: bool) -> None:
        self.manager = KVCacheManager(num_blocks, SIZE, enable_prefix_caching=caching)
        self.store: dict[tuple[int, int], Content] = {}
        self.running: list[Running] = []
        self.weights = 0

    @rule(
        token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple),
        salt=st.sampled_from([b"", b"salt"]),
        use_cache=st.booleans(),
    )
    def begin(self, token_ids: tuple[int, ...], salt: bytes, use_cache: bool) -> None:
        table = self.manager.new_table(token_ids, salt, use_cache=use_cache)
        num_computed = len(table.blocks) * SIZE
        assert num_computed < len(token_ids)
        assert use_cache or not num_computed
        self.running.append(Running(token_ids, salt, self.weights, table, num_computed))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 9), fails=st.booleans())
    def compute(self, data: st.DataObject, count: int, fails: bool) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        end = min(sequence.num_computed + count, len(sequence.token_ids))
        if not self.manager.grow(sequence.table, end):
            return
        for position in range(sequence.num_computed, end):
            self.store[self._place(sequence.table, position)] = self._content(sequence, position)
        if not fails:
            sequence.num_computed = end
            self.manager.commit(sequence.table, sequence.token_ids, end)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tail=st.lists(st.integers(0, 1), max_size=6).map(tuple))
    def fork(self, data: st.DataObject, tail: tuple[int, ...]) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        forked = self.manager.fork(sequence.table, sequence.num_computed)
        if forked is None:
            assert self.manager.num_free == 0
            return
        child, copy = forked
        if copy is not None:
            for offset in range(SIZE):
                if (copy[0], offset) in self.store:
                    self.store[copy[1], offset] = self.store[copy[0], offset]
        token_ids = (*sequence.token_ids[: sequence.num_computed], *tail, 0)
        self.running.append(
            Running(token_ids, sequence.salt, sequence.weights, child, sequence.num_computed)
        )

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.running))
        self.running.remove(sequence)
        self.manager.free(sequence.table)

    @rule()
    def change_weights(self) -> None:
        self.manager.reset_prefix_cache()
        self.weights += 1

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity(sequence.table for sequence in self.running)
        for sequence in self.running:
            for position in range(sequence.num_computed):
                held = self.store[self._place(sequence.table, position)]
                assert held == self._content(sequence, position)

    def _place(self, table: BlockTable, position: int) -> tuple[int, int]:
        return table.blocks[position // SIZE], position % SIZE

    def _content(self, sequence: Running, position: int) -> Content:
        return sequence.salt, sequence.weights, sequence.token_ids[: position + 1]

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for sequence in self.running:
                self.manager.free(sequence.table)
            self.manager.check_integrity([])
            assert self.manager.num_free == self.manager.num_blocks


TestManagerAndBlocks = ManagerAndBlocks.TestCase
TestManagerAndBlocks.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
