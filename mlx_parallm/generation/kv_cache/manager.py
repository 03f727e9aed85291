"""Gives sequences their blocks: prefix matches, growth, forks and release."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from weakref import WeakValueDictionary

from mlx_parallm.generation.inputs.prompt_inputs import NO_INPUTS, PromptInputs
from mlx_parallm.generation.kv_cache.blocks import BlockPool, BlockTable, Tail
from mlx_parallm.generation.kv_cache.fetches import ChainFetch
from mlx_parallm.generation.kv_cache.snapshots import StateSnapshots
from mlx_parallm.generation.kv_cache.stored_chains import StoredChain, StoredChains
from mlx_parallm.generation.kv_cache.tiers import ArrivedBlock, Tiers
from mlx_parallm.types.content import block_hash, root_hash

# UNFINDABLE: a table with this generation is in no generation of the prefix cache.
UNFINDABLE = -1
# SOURCE begins the salts of sources, so that no prompt has their roots.
SOURCE = b"source "


class KVCacheManager:
    """Every operation either happens whole or changes nothing.

    Attributes:
        block_size: tokens per block.
        enable_prefix_caching: whether equal prefixes share blocks.
        tiers: the stores below the pool; None if there are none.
        stored: the prefixes in them; None if there are none.
        snapshots: of the states after prefixes; None for a model without state, or if none are
            kept.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        tiers: Tiers | None = None,
        snapshots: StateSnapshots | None = None,
        has_kv: bool = True,
    ) -> None:
        """Begin with an empty pool.

        Args:
            num_blocks: blocks in the pool.
            block_size: tokens per block.
            enable_prefix_caching: whether equal prefixes share blocks. A model with a state needs
                ``snapshots`` for it.
            tiers: the stores below the pool.
            snapshots: see the attributes.
            has_kv: False if blocks only count tokens: a snapshot has all there is of a prefix.
        """
        assert enable_prefix_caching or tiers is None, "stores need a prefix cache"
        assert enable_prefix_caching or snapshots is None, "snapshots are part of a prefix cache"
        assert has_kv or snapshots is not None or not enable_prefix_caching, "nothing is cached"
        self.snapshots = snapshots
        self._has_kv = has_kv
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.tiers = tiers
        self._pool = BlockPool(num_blocks)
        self.stored = None
        if tiers is not None:
            self.stored = StoredChains(
                tiers, self._pool, block_size, snapshots=snapshots, has_kv=has_kv
            )
            if tiers.exports is not None:
                tiers.exports.attach(self._pool, tiers)
        self._generation = 0
        # The tables of the sequences whose states were kept, by the snapshots' slots.
        self._snapshot_tables = WeakValueDictionary[int, BlockTable]()

    @property
    def num_snapshot_slots(self) -> int:
        """Return the most snapshots, which have slots for states behind those of sequences."""
        return 0 if self.snapshots is None else self.snapshots.stats.num_slots

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Share of blocks that sequences hold, 0 to 1."""
        return 1 - self._pool.num_free / self._pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def new_table(
        self,
        token_ids: Sequence[int],
        salt: bytes,
        *,
        use_cache: bool,
        inputs: PromptInputs = NO_INPUTS,
        lasting_salt: bytes | None = None,
        tail: Tail | None = None,
    ) -> BlockTable:
        """Return a table that begins with the cached blocks of the longest known prefix.

        At least one token is left to compute, since its logits are needed. The prefix ends where
        rows of ``inputs`` may be cut; for a model with a state, where there is a snapshot, which
        the table holds. ``lasting_salt`` is ``salt`` as every process has it; None if no store may
        have the blocks. ``tail`` is what the sequence left when it was preempted; ``claim_tail``
        must follow if the table is used.
        """
        lasting_root = None if lasting_salt is None else root_hash(lasting_salt)
        table = BlockTable(root_hash(salt), self._generation, inputs, lasting_root)
        if self.tiers is not None and self.tiers.exports is not None:
            self.tiers.exports.note(table)
        if not (use_cache and self.enable_prefix_caching):
            return table
        matched = self._match(table, token_ids)
        num_whole = table.count_whole(len(matched), self.block_size)
        if self.snapshots is None:
            last = list[int | None]()
        elif tail is not None and self._may_use(tail, table, token_ids):
            table.snapshot = self.snapshots.hold(tail.content)
            num_whole = (tail.num_tokens - 1) // self.block_size
            last = [self._pool.find(tail.content)]
            table.tail = tail.content
        else:
            num_found = matched.index(None) if None in matched else num_whole
            table.num_matched = min(num_found, num_whole) * self.block_size
            num_whole, last = self._hold_snapshot(table, num_whole, self.snapshots), []
        del matched[num_whole:], table.hashes[num_whole:]
        table.num_cached = tail.num_tokens if tail and last else num_whole * self.block_size
        return self._own(table, [*matched, *last])

    def source_table(
        self,
        salt: bytes,
        num_tokens: int,
        room: int,
        *,
        lasting_salt: bytes | None = None,
        is_cached: bool = True,
    ) -> BlockTable | None:
        """Return the table of a source: the cached blocks if all are cached, otherwise new ones.

        Nothing of it is findable before ``commit_source``. Its blocks form a chain as those of a
        prompt do, under a root that stands for the whole source.

        Args:
            salt: what the KV depends on, the source included.
            num_tokens: positions of the source.
            room: most blocks to allocate; None is returned if it takes more.
            lasting_salt: see ``new_table``.
            is_cached: False if no other request may find it.
        """
        table = self._source_chain(salt, lasting_salt)
        if is_cached and self.enable_prefix_caching:
            matched = self._match(table, self._source_places(num_tokens))
            if len(matched) == self.blocks_for(num_tokens):
                table.num_cached = len(matched) * self.block_size
                return self._own(table, matched)
            table.clear()
        if not is_cached:
            self.withhold(table)
        count = self.blocks_for(num_tokens)
        blocks = self._allocate(count) if count <= room else None
        if blocks is None:
            return None
        table.append(blocks)
        return table

    def stored_source(
        self, salt: bytes, num_tokens: int, lasting_salt: bytes | None
    ) -> StoredChain | None:
        """Return the chain of a source that memory lacks, if stores have all of it."""
        if self.stored is None or lasting_salt is None:
            return None
        table, places = self._source_chain(salt, lasting_salt), self._source_places(num_tokens)
        links = table.links(places, num_tokens, self.block_size)
        if all(self._pool.find(table.root + link) is not None for link in links):
            return None
        return self.stored.find_source(table, places)

    def _source_chain(self, salt: bytes, lasting_salt: bytes | None) -> BlockTable:
        """Return the table of a source, without blocks."""
        lasting = None if lasting_salt is None else root_hash(SOURCE + lasting_salt)
        table = BlockTable(root_hash(SOURCE + salt), self._generation, lasting_root=lasting)
        table.is_source = True
        return table

    def commit_source(self, table: BlockTable) -> None:
        """Make the blocks of a computed source findable."""
        num_tokens = len(table.blocks) * self.block_size
        self.commit(table, self._source_places(num_tokens), num_tokens)

    def _source_places(self, num_tokens: int) -> range:
        """Return what stands for the tokens of a source's blocks, and one more.

        The last block counts as full: it is used whole, as all of the source is.
        """
        return range(self.blocks_for(num_tokens) * self.block_size + 1)

    def _match(self, table: BlockTable, token_ids: Sequence[int]) -> list[int | None]:
        """Return the blocks of the longest cached chain, whose hashes are added to the table.

        Without KV it is the whole chain, with None for blocks that are not cached.
        """
        matched: list[int | None] = []
        for first in range(0, len(token_ids) - self.block_size, self.block_size):
            link = table.link(token_ids, first, first + self.block_size)
            block = self._pool.find(table.root + link)
            if block is None and self._has_kv:
                break
            matched.append(block)
            table.hashes.append(link)
        return matched

    def _may_use(self, tail: Tail, table: BlockTable, token_ids: Sequence[int]) -> bool:
        """Return True if there is all that the tail of a table's sequence needs."""
        assert self.snapshots is not None, "a tail without snapshots"
        if not tail.content.startswith(table.root) or not self.snapshots.has(tail.content):
            return False
        num_before = (tail.num_tokens - 1) // self.block_size
        if len(table.hashes) < num_before or len(token_ids) <= tail.num_tokens:
            return False
        block = self._pool.find(tail.content)
        return not self._has_kv or (block is not None and self._pool.is_cached(block))

    def _hold_snapshot(self, table: BlockTable, num_blocks: int, snapshots: StateSnapshots) -> int:
        """Let a table hold the latest snapshot; return the number of full blocks before it."""
        for count in range(num_blocks, 0, -1):
            content = table.root + table.hashes[count - 1]
            if snapshots.has(content):
                table.snapshot, table.found = snapshots.hold(content), content
                return count
        return 0

    def _own(self, table: BlockTable, blocks: list[int | None]) -> BlockTable:
        """Give a table its cached blocks; None stands for one that only counts tokens."""
        for block in blocks:
            if block is not None:
                self._pool.share(block)
        missing = self._allocate(blocks.count(None))
        if missing is None:
            table.append([block for block in blocks if block is not None])
            self.free(table, is_saved=False)
            return table
        table.append([missing.pop() if block is None else block for block in blocks])
        return table

    def claim_tail(self, table: BlockTable) -> None:
        """Let a table that begins with a tail change its last block."""
        content, table.tail = table.tail, b""
        if content and self.snapshots is not None:
            self.snapshots.forget(content)
            if self._pool.find(content) is not None:
                self._pool.drop_content(table.blocks[-1])

    def leave_tail(
        self, table: BlockTable, token_ids: Sequence[int], num_tokens: int
    ) -> Tail | None:
        """Let the last block of a table be found by exactly so many tokens, all known.

        Return None if what is before it cannot be found. A step in flight may still compute the
        last token: the snapshot must not be found unless that step succeeds.
        """
        size, num_before = self.block_size, (num_tokens - 1) // self.block_size
        if not self.is_current(table) or len(token_ids) < num_tokens or not num_tokens:
            return None
        if num_tokens % size == 0 and len(table.hashes) * size >= num_tokens:
            content = table.root + table.hashes[num_tokens // size - 1]
            return Tail(content, num_tokens, is_whole=True)
        if len(table.hashes) != num_before:
            return None
        start = num_before * size
        parent = b"tail %d of " % num_tokens + table.parent
        key = table.inputs.block_key(start, num_tokens)
        content = table.root + block_hash(parent, token_ids[start:num_tokens], key)
        self._pool.set_content(table.blocks[num_before], content)
        return Tail(content, num_tokens)

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` tokens in all; False if the pool cannot."""
        missing = self.blocks_for(num_tokens) - len(table.blocks)
        if missing <= 0:
            return True
        blocks = self._allocate(missing)
        if blocks is None:
            return False
        table.append(blocks)
        return True

    def _allocate(self, count: int) -> list[int] | None:
        """Own blocks; those that stores are to get are read before the next step."""
        blocks = self._pool.allocate(count)
        if blocks and self.tiers is not None:
            self.tiers.saves.leave(blocks)
        return blocks

    def commit(self, table: BlockTable, token_ids: Sequence[int], num_computed: int) -> int:
        """Make the full blocks among ``num_computed`` computed tokens findable by content.

        Blocks of a table older than the last reset are skipped: they follow blocks that the reset
        dropped. Returns the number of tokens in blocks whose content the cache did not have.
        """
        if not self.enable_prefix_caching or not self.is_current(table):
            return 0
        size, num_new = self.block_size, 0
        for index in range(len(table.hashes), num_computed // size):
            link = table.link(token_ids, index * size, index * size + size)
            table.hashes.append(link)
            num_new += size * self._pool.set_content(table.blocks[index], table.root + link)
        return num_new

    def content_after(self, table: BlockTable, token_ids: Sequence[int], num_tokens: int) -> bytes:
        """Return the content of the last of a table's first blocks, which may not be computed."""
        links = [table.parent, *table.links(token_ids, num_tokens, self.block_size)]
        return table.root + links[-1]

    def continue_stored(
        self,
        table: BlockTable,
        token_ids: Sequence[int],
        fetch: ChainFetch,
        arrived: Sequence[ArrivedBlock],
    ) -> Sequence[ArrivedBlock]:
        """Return what the blocks behind a table's are filled with, and its state at the end.

        With a state, the table gets the blocks before these that memory has, and holds no snapshot.
        """
        assert self.stored is not None, "no stores are read"
        before, filling = self.stored.claim(table, token_ids, fetch, arrived)
        if fetch.state is not None and filling:
            if table.snapshot is not None:
                self.take_snapshot(table)
            self._own(table, before)
        return filling

    def commit_snapshot(
        self, slot: int, table: BlockTable, content: bytes, *, is_passing: bool
    ) -> None:
        """Let a snapshot of a table's prefix be found; see ``StateSnapshots.commit``."""
        assert self.snapshots is not None, "no snapshots are kept"
        self.snapshots.commit(slot, content, is_passing=is_passing)
        self._snapshot_tables[slot] = table

    def reserve_snapshot(self, *, is_passing: bool = False) -> int | None:
        """Return a slot for a snapshot; None if there is none to evict.

        ``is_passing``: see ``StateSnapshots.commit``. Such ones leave a slot for ends of prompts.
        Stores get what is evicted before the next step, which may write to it.
        """
        assert self.snapshots is not None, "no snapshots are kept"
        if is_passing and self.snapshots.is_busy:
            return None
        if self.stored is not None and (victim := self.snapshots.victim) is not None:
            table = self._snapshot_tables.pop(victim, None)
            if table is not None:
                # Its sequence may go on for long before its chain is saved.
                self.stored.queue(table)
        slot = self.snapshots.reserve()
        if slot is not None and self.tiers is not None:
            self.tiers.saves.leave([slot], are_states=True)
        return slot

    def filled_block(self, table: BlockTable, num_tokens: int, *, is_drafted: bool) -> int:
        """Return the block of the last of ``num_tokens`` tokens, which is filled before a step.

        ``is_drafted``: a draft model's KV of it is filled too.
        """
        block = table.blocks[num_tokens // self.block_size - 1]
        if is_drafted:
            self._pool.drafted.add(block)
        return block

    def forget_computed(self, table: BlockTable, links: Sequence[bytes] = ()) -> None:
        """Let no later sequence find what is computed for a table, because it has NaN.

        ``links``: the hashes of the blocks that it had, if it holds nothing any more.
        """
        self.withhold(table)
        links = table.hashes[table.num_cached // self.block_size :] or links
        places = [self._pool.find(table.root + link) for link in links]
        blocks = [block for block in places if block is not None]
        for block in blocks:
            self._pool.forget(block)
        if self.tiers is not None:
            self.tiers.saves.forget(blocks)

    def is_current(self, table: BlockTable) -> bool:
        """Return True if what this table computes from now on becomes findable."""
        return table.generation == self._generation

    def withhold(self, table: BlockTable) -> None:
        """Keep what this table computes from now on out of the prefix cache."""
        table.generation = UNFINDABLE

    def mark_drafted(self, table: BlockTable, num_tokens: int) -> None:
        """Note that a draft model has computed the first ``num_tokens`` tokens."""
        num_full = num_tokens // self.block_size
        self._pool.drafted.update(table.blocks[table.num_drafted : num_full])
        table.num_drafted = max(table.num_drafted, num_full)

    def count_drafted(self, table: BlockTable) -> int:
        """Leading tokens in full blocks that a draft model has computed."""
        for index, block in enumerate(table.blocks):
            if block not in self._pool.drafted:
                return index * self.block_size
        return len(table.blocks) * self.block_size

    def fork(
        self, table: BlockTable, num_tokens: int
    ) -> tuple[BlockTable, tuple[int, int] | None] | None:
        """Return a table that shares the first ``num_tokens`` tokens of another.

        Full blocks are shared; a partial last one becomes a block of its own, whose content must be
        copied.

        Returns:
            The new table and the ``(source, target)`` to copy, or None if the pool has no block.
        """
        num_full, rest = divmod(num_tokens, self.block_size)
        assert self.blocks_for(num_tokens) <= len(table.blocks), "a fork of tokens without a block"
        own = self._allocate(1 if rest else 0)
        if own is None:
            return None
        child = BlockTable(table.root, table.generation, table.inputs, table.lasting_root)
        for block in table.blocks[:num_full]:
            self._pool.share(block)
        child.append([*table.blocks[:num_full], *own])
        child.hashes = table.hashes[:num_full]
        return child, ((table.blocks[num_full], own[0]) if own else None)

    def free(self, table: BlockTable, *, is_saved: bool = True) -> None:
        """Release every block; the last ones first, so that they are evicted first.

        ``is_saved``: stores get what they lack of them.
        """
        if is_saved and self.stored is not None:
            self.stored.queue(table)
        for block in reversed(table.blocks):
            self._pool.release(block)
        if table.snapshot is not None:
            self.take_snapshot(table)
        table.clear()

    def take_snapshot(self, table: BlockTable) -> int:
        """Return the slot that a table holds, and hold it no longer.

        The copy that restores it must be in the next batch: then the slot may have another use.
        """
        slot, table.snapshot = table.snapshot, None
        assert slot is not None, "the table holds no snapshot"
        assert self.snapshots is not None
        self.snapshots.release(slot)
        return slot

    @contextmanager
    def borrowed_block(self) -> Generator[int | None]:
        """Hold a block while the context lasts; None if there is none to allocate.

        The least recently used cached block is evicted only if no block is free.
        """
        blocks = self._pool.allocate(1)
        if blocks and self.tiers is not None:
            # It may be written to at once.
            self.tiers.saves.forget(blocks)
        try:
            yield blocks[0] if blocks else None
        finally:
            for block in blocks or ():
                self._pool.release(block)

    def reset_prefix_cache(self) -> None:
        """Let no later sequence find in the pool what was computed before, or is by those that run.

        What stores have stays; what they were to get of the pool is forgotten.
        """
        self._pool.clear_cache()
        if self.snapshots is not None:
            self.snapshots.clear()
        self._generation += 1
        if self.tiers is not None:
            self.tiers.saves.clear()

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Assert that every block is free, cached or owned, exactly once."""
        owners = [0] * self.num_blocks
        for table in tables:
            assert len(set(table.blocks)) == len(table.blocks), "a table holds a block twice"
            for block in table.blocks:
                owners[block] += 1
        self._pool.check_integrity(owners)
