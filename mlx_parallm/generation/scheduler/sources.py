"""Sources of encoder-decoders: their cross-attention KV lies in blocks of the decoder's pools.

A source is computed whole and used whole: the encoder reads both ways, so the KV of a part depends
on all of it. Its blocks are found by the content of the whole source once the step that computed
them has ended; while no sequence needs them, the pool may evict them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import count

from mlx_parallm.engine.adapter_slots import NO_ADAPTER, AdapterSlots
from mlx_parallm.generation.inputs.cache import Product
from mlx_parallm.generation.kv_cache.blocks import BlockTable
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.types.model_input import InputRows, ModelInput, SourcePlace
from mlx_parallm.types.step import SourceTable


@dataclass(frozen=True, slots=True)
class SourceKey:
    """All that the KV of a source depends on.

    Attributes:
        salt: of the source itself, the weights, the adapter and the scope.
        lasting_salt: ``salt`` as every process has it; None if no store may have the blocks.
        adapter: the content of the adapter; None for none.
        owner: the only request that may use the KV; None if any may.
    """

    salt: bytes
    lasting_salt: bytes | None = None
    adapter: str | None = None
    owner: Hashable | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class SourceProduct(Product):
    """The cross-attention KV of a source.

    Attributes:
        key: what it depends on.
        blocks: where it lies.
        table: the same for steps.
        num_cached: its tokens, if they were found in the prefix cache.
    """

    key: SourceKey
    blocks: BlockTable
    table: SourceTable
    num_cached: int


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
        self._kv = kv
        self._adapters = adapters
        self._numbers = count()
        self._products: dict[int, SourceProduct] = {}
        # Those that other sequences may use too.
        self._by_key: dict[SourceKey, SourceProduct] = {}
        # Products whose last stage is planned, and those of each step in flight.
        self._planned: list[SourceProduct] = []
        self._dropped: set[int] = set()
        self._in_flight: dict[int, list[SourceProduct]] = {}

    def hold(self, key: SourceKey, source: ModelInput, room: int) -> HeldSource | None:
        """Count one more user of a source; it waits to be computed if its KV is not cached.

        None, and nothing is evicted, if it needs more than ``room`` blocks.
        """
        product = self._by_key.get(key)
        if product is None:
            product = self._open(key, source, room)
            if product is None:
                return None
            self.num_found += product.is_ready
        else:
            self.num_found += 1
        product.num_users += 1
        return HeldSource(self, product)

    def _open(self, key: SourceKey, source: ModelInput, room: int) -> SourceProduct | None:
        blocks = self._kv.source_table(
            key.salt,
            source.num_kv_tokens,
            room,
            lasting_salt=key.lasting_salt,
            is_cached=key.owner is None,
        )
        if blocks is None:
            return None
        is_found = blocks.num_cached > 0
        product = SourceProduct(
            source,
            next(self._numbers),
            is_ready=is_found,
            key=key,
            blocks=blocks,
            table=SourceTable(block_table=blocks.as_tuple(), num_tokens=source.num_kv_tokens),
            num_cached=source.num_kv_tokens if is_found else 0,
        )
        self._products[product.slot] = self._by_key[key] = product
        if not is_found:
            self.waiting[product.slot] = product
        return product

    def release(self, product: SourceProduct) -> None:
        """Count one user less; without any the blocks are the pool's.

        A run in progress must write nothing for it any more. A later user begins anew, since the
        run began with a slot of an adapter that may be another one's by then.
        """
        assert product.num_users > 0, "a source is released more often than held"
        product.num_users -= 1
        if not product.num_users:
            if not product.is_ready and product.slot not in self.waiting:
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
                product.num_users += 1
                self._planned.append(product)

    def begin_step(self, step_id: int) -> None:
        """Note that what was planned is computed by this step."""
        if self._planned:
            self._in_flight[step_id], self._planned = self._planned, []

    def end_step(self, step_id: int, *, has_failed: bool = False) -> None:
        """Let later requests find what a step has computed."""
        for product in self._in_flight.pop(step_id, ()):
            if not has_failed and self._by_key.get(product.key) is product:
                self._kv.commit_source(product.blocks)
            product.is_ready = True
            self.release(product)

    def spoil(self, product: SourceProduct) -> None:
        """Let no later request find a source, because its KV may be no numbers."""
        self._detach(product)
        self._kv.forget_computed(product.blocks)

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

    def tables(self) -> list[BlockTable]:
        """Return the tables of all products."""
        return [product.blocks for product in self._products.values()]

    def check_integrity(self, num_users: int) -> None:
        """Assert that users are accounted for; ``num_users`` of all sequences."""
        of_steps = [*self._planned, *(each for step in self._in_flight.values() for each in step)]
        counted = sum(product.num_users for product in self._products.values())
        assert counted == num_users + len(of_steps), "users of sources are lost"
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
        self._kv.free(product.blocks)


@dataclass(frozen=True, slots=True)
class HeldSource:
    """The source that a running sequence holds. Implements ``Held``."""

    cache: SourceCache
    product: SourceProduct

    @property
    def source(self) -> SourceTable:
        """Return the KV that every row attends to."""
        return self.product.table

    @property
    def num_cached(self) -> int:
        """Return the tokens of the source whose KV was found."""
        return self.product.num_cached

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

    def release(self) -> None:
        """See ``Held``."""
        self.cache.release(self.product)
