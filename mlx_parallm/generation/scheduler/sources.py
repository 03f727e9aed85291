"""Sources of encoder-decoders: their cross-attention KV lies in blocks of the decoder's pools.

A source is computed whole and used whole: the encoder reads both ways, so the KV of a part depends
on all of it. Its blocks are found by the content of the whole source once the step that computed
them has ended; while no sequence needs them, the pool may evict them. Stores below the pool keep
them too: their bytes are read before a sequence starts, and fill its source's blocks once it runs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from mlx_parallm.engine.adapter_slots import NO_ADAPTER, AdapterSlots
from mlx_parallm.generation.inputs.cache import Product
from mlx_parallm.generation.kv_cache.blocks import BlockTable
from mlx_parallm.generation.kv_cache.fetches import ChainFetch
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.kv_cache.tiers import ArrivedBlock
from mlx_parallm.generation.scheduler.source_reads import SourceKey, SourceRead, SourceReads
from mlx_parallm.types.content import Buffer
from mlx_parallm.types.model_input import InputRows, ModelInput, SourcePlace
from mlx_parallm.types.step import SourceTable


@dataclass(slots=True, eq=False, kw_only=True)
class SourceProduct(Product):
    """The cross-attention KV of a source.

    Attributes:
        key: what it depends on.
        blocks: where it lies.
        table: the same for steps.
        read: the bytes of its blocks, until all are filled; None without any.
        arrived: what its next blocks are filled with.
        num_steps: steps in flight, or planned, that write to its blocks.
        is_lost: True if one of them failed, which was to fill blocks: it is to be encoded.
        is_proven: True once a row has used it: it is finite, so stores may have it.
    """

    key: SourceKey
    blocks: BlockTable
    table: SourceTable
    read: SourceRead | None = None
    arrived: deque[ArrivedBlock] = field(default_factory=deque[ArrivedBlock])
    num_steps: int = 0
    is_lost: bool = False
    is_proven: bool = False


class SourceCache:
    """The sources that sequences use, or steps compute, now. Implements ``ProductCache``.

    Attributes:
        waiting: products that nothing was computed of, in the order in which they are needed.
        num_found: how often a sequence found the KV of its source.
    """

    def __init__(self, kv: KVCacheManager, adapters: AdapterSlots) -> None:
        """``adapters``: a sequence has a slot for that of its source, for as long as it runs."""
        self.waiting: dict[int, SourceProduct] = {}
        self.num_found = 0
        self._reads = None if kv.tiers is None else SourceReads(kv, kv.tiers)
        self._kv = kv
        self._adapters = adapters
        self._numbers = count()
        self._products: dict[int, SourceProduct] = {}
        # Those that other sequences may use too.
        self._by_key: dict[SourceKey, SourceProduct] = {}
        # Products whose last stage, or the filling of whose blocks, is planned, and those of each
        # step in flight.
        self._planned: list[SourceProduct] = []
        self._dropped: set[int] = set()
        self._in_flight: dict[int, list[SourceProduct]] = {}

    def read(self, key: SourceKey, source: ModelInput) -> SourceRead | None:
        """Return the read of a source that memory lacks, for one more sequence; None without."""
        if self._reads is None or key in self._by_key:
            return None
        return self._reads.join(key, source.num_kv_tokens)

    def leave_read(self, read: SourceRead) -> None:
        """Count one sequence less that waits for a read."""
        if self._reads is not None:
            self._reads.leave(read)

    def hold(
        self, key: SourceKey, source: ModelInput, room: int, read: SourceRead | None = None
    ) -> HeldSource | None:
        """Count one more user of a source; it waits to be computed if its KV is not found.

        Args:
            key: what the KV depends on.
            source: the source.
            room: most blocks to allocate; None is returned, and nothing evicted, if it takes more.
            read: what was read of it for the sequence; the caller leaves it.
        """
        product, hits = self._by_key.get(key), Counter[str]()
        is_found = product is not None
        if product is None:
            product = self._open(key, source, room, read)
            if product is None:
                return None
            is_found = product.is_ready or product.read is not None
            hits = self._count_hits(product)
        self.num_found += is_found
        product.num_users += 1
        return HeldSource(self, product, source.num_kv_tokens if is_found else 0, hits)

    def _count_hits(self, product: SourceProduct) -> Counter[str]:
        """Return how many tokens came from each store."""
        hits, rest = Counter[str](), product.table.num_tokens
        for block in product.arrived:
            hits[block.tier] += min(rest, self._kv.block_size)
            rest -= self._kv.block_size
        return hits

    def _open(
        self, key: SourceKey, source: ModelInput, room: int, read: SourceRead | None
    ) -> SourceProduct | None:
        blocks = self._kv.source_table(
            key.salt,
            source.num_kv_tokens,
            room,
            lasting_salt=key.lasting_salt,
            is_cached=key.owner is None,
        )
        if blocks is None:
            return None
        product = SourceProduct(
            source,
            next(self._numbers),
            is_ready=blocks.num_cached > 0,
            key=key,
            blocks=blocks,
            table=SourceTable(block_table=blocks.as_tuple(), num_tokens=source.num_kv_tokens),
        )
        self._products[product.slot] = self._by_key[key] = product
        if not product.is_ready and not self._take(product, read):
            self.waiting[product.slot] = product
        return product

    def _take(self, product: SourceProduct, read: SourceRead | None) -> bool:
        """Have a product's blocks filled with what was read; False if that is not all of it."""
        if read is None or self._reads is None:
            return False
        product.arrived.extend(self._reads.take(read, len(product.blocks.blocks)))
        if not product.arrived:
            return False
        product.read, product.is_proven = read, True
        return True

    def fill(self, product: SourceProduct, limit: int) -> list[tuple[int, Buffer]]:
        """Return the next blocks of a product to fill before the step that is planned, with bytes.

        They are at most ``limit``. It can be used once the step that fills the last has ended.
        """
        blocks = product.blocks.blocks
        rest = blocks[len(blocks) - len(product.arrived) :]
        filled = [(block, product.arrived.popleft().data) for block in rest[: max(limit, 0)]]
        if filled:
            self._use(product)
            if not product.arrived:
                self._end_read(product)
        return filled

    def _use(self, product: SourceProduct) -> None:
        """Let the step that is planned use a product until it has ended."""
        product.num_users += 1
        product.num_steps += 1
        self._planned.append(product)

    def _end_read(self, product: SourceProduct) -> None:
        product.arrived.clear()
        if product.read is not None and self._reads is not None:
            self._reads.end(product.read)
        product.read = None

    def release(self, product: SourceProduct) -> None:
        """Count one user less; without any the blocks are the pool's.

        A run in progress must write nothing for it any more. A later user begins anew, since the
        run began with a slot of an adapter that may be another one's by then.
        """
        assert product.num_users > 0, "a source is released more often than held"
        product.num_users -= 1
        if not product.num_users:
            is_begun = not (product.is_ready or product.slot in self.waiting or product.arrived)
            if is_begun:
                self._dropped.add(product.slot)
            self._drop(product)

    def places(self, products: Iterable[Product]) -> tuple[SourcePlace, ...]:
        """See ``ProductCache``."""
        return tuple(self._place(self._products[each.slot]) for each in products)

    def _place(self, product: SourceProduct) -> SourcePlace:
        adapter = product.key.adapter
        slot = NO_ADAPTER if adapter is None else self._adapters.slot_of(adapter)
        return SourcePlace(
            block_table=product.table.block_table, adapter_slot=slot, adapter=adapter
        )

    def finish(self, products: Iterable[Product]) -> None:
        """See ``ProductCache``: the step that computes them uses them until it has ended."""
        for each in products:
            product = self._products.get(each.slot)
            if product is not None:
                self._use(product)

    def begin_step(self, step_id: int) -> None:
        """Note that what was planned is computed by this step."""
        if self._planned:
            self._in_flight[step_id], self._planned = self._planned, []

    def end_step(self, step_id: int, *, has_failed: bool = False) -> None:
        """Let later requests find what a step has computed, or filled as the last one."""
        for product in self._in_flight.pop(step_id, ()):
            product.num_steps -= 1
            # Only KV that stores had is proven before it is ready.
            if has_failed and product.is_proven:
                self._end_read(product)
                product.is_lost, product.is_proven = True, False
            if not product.num_steps and not product.arrived:
                self._complete(product, is_computed=not has_failed)
            self.release(product)

    def _complete(self, product: SourceProduct, *, is_computed: bool) -> None:
        """Let a product be used; one that is lost waits to be computed."""
        if product.is_lost:
            product.is_lost = False
            self.waiting[product.slot] = product
            return
        if is_computed and self._by_key.get(product.key) is product:
            self._kv.commit_source(product.blocks)
        product.is_ready = True

    def spoil(self, product: SourceProduct) -> None:
        """Let no later request find a source, because its KV may be no numbers."""
        self._detach(product)
        self._kv.forget_computed(product.blocks)
        product.is_proven = False

    def take_dropped(self) -> tuple[int, ...]:
        """See ``ProductCache``: sources in runs that go on."""
        dropped, self._dropped = tuple(sorted(self._dropped)), set()
        return dropped

    def drop_unused(self, products: Iterable[Product]) -> None:
        """See ``ProductCache``: what has no users was dropped with the last of them."""

    def clear(self) -> None:
        """Let no later request use what is held now."""
        self._by_key.clear()

    def forget(self, slots: Iterable[int]) -> None:
        """See ``ProductCache``: the users of these fail."""
        for slot in slots:
            product = self._products.get(slot)
            if product is not None:
                self._detach(product)

    def fetches(self) -> list[ChainFetch]:
        """Return the chains that are read, or not filled yet."""
        reads = [*(self._reads or ())]
        reads += [each.read for each in self._products.values() if each.read is not None]
        return [read.fetch for read in reads]

    def tables(self) -> list[BlockTable]:
        """Return the tables of all products."""
        return [product.blocks for product in self._products.values()]

    def check_integrity(self, num_users: int) -> None:
        """Assert that users are accounted for; ``num_users`` of all sequences."""
        of_steps = [*self._planned, *(each for step in self._in_flight.values() for each in step)]
        counted = sum(product.num_users for product in self._products.values())
        assert counted == num_users + len(of_steps), "users of sources are lost"
        num_steps = sum(product.num_steps for product in self._products.values())
        assert num_steps == len(of_steps), "a step that writes a source is lost"
        assert all(self._products[slot] is each for slot, each in self.waiting.items())
        assert all(self._products[each.slot] is each for each in self._by_key.values())
        assert all(each.num_users for each in self._products.values()), "a source without a user"

    def _detach(self, product: SourceProduct) -> None:
        if self._by_key.get(product.key) is product:
            del self._by_key[product.key]

    def _drop(self, product: SourceProduct) -> None:
        self._detach(product)
        del self._products[product.slot]
        self.waiting.pop(product.slot, None)
        self._end_read(product)
        self._kv.free(product.blocks, is_saved=product.is_proven)


@dataclass(frozen=True, slots=True)
class HeldSource:
    """The source that a running sequence holds. Implements ``Held``.

    Attributes:
        cache: has the source.
        product: its KV.
        num_cached: the tokens of the source, if the sequence found their KV.
        hits: how many of them each store had.
    """

    cache: SourceCache
    product: SourceProduct
    num_cached: int
    hits: Mapping[str, int]

    @property
    def source(self) -> SourceTable:
        """Return the KV that every row attends to."""
        return self.product.table

    @property
    def num_held(self) -> int:
        """See ``Held``."""
        return 1

    def acquire(self, start: int, stop: int) -> int:
        """See ``Held``: no row can run before the source is computed."""
        return stop if self.product.is_ready else start

    def is_awaited(self, position: int) -> bool:
        """See ``Arrival``."""
        del position
        return not self.product.is_ready

    @property
    def is_filling(self) -> bool:
        """See ``Held``."""
        return bool(self.product.arrived)

    def fill(self, limit: int) -> list[tuple[int, Buffer]]:
        """See ``Held``."""
        return self.cache.fill(self.product, limit)

    def note_use(self) -> None:
        """See ``Held``: rows of a source that is not finite fail."""
        self.product.is_proven = True

    def rows(self, start: int, stop: int) -> tuple[InputRows, ...]:
        """See ``Held``: a source has no rows in the prompt."""
        del start, stop
        return ()

    def pass_rows(self, start: int) -> None:
        """See ``Held``: later rows need the source too."""

    def has_any(self, slots: set[int]) -> bool:
        """See ``Held``."""
        return self.product.slot in slots

    def spoil(self) -> None:
        """See ``Held``."""
        self.cache.spoil(self.product)

    def fork(self) -> HeldSource:
        """See ``Held``: both use the same blocks, whatever the weights are now."""
        self.product.num_users += 1
        return replace(self)

    def release(self) -> None:
        """See ``Held``."""
        self.cache.release(self.product)
