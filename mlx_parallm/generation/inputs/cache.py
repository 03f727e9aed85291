"""Which features of inputs are kept on the device, and in which slot."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, MutableMapping
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Protocol

from mlx_parallm.types.model_input import InputKind, ModelInput, SourcePlace


@dataclass(slots=True, eq=False)
class Product:
    """The rows, features or KV that are computed of an input.

    Attributes:
        source: the input; without its arrays once its computation began.
        slot: where the worker keeps features; the number of the product, if it is KV.
        num_users: how many sequences need it now.
        is_ready: True if steps may name it: it is computed before them.
    """

    source: ModelInput
    slot: int
    num_users: int = 0
    is_ready: bool = False


class ProductCache(Protocol):
    """Keeps products of one kind, for ``InputRuns``, which computes them.

    Attributes:
        waiting: products that nothing was computed of, in the order in which they are needed.
    """

    @property
    def waiting(self) -> MutableMapping[int, Any]:
        """The products that wait, by slot; those whose computation begins are taken out."""
        ...

    def places(self, products: Iterable[Product]) -> tuple[SourcePlace, ...]:
        """Return where KV of products goes, one for each; empty for features."""
        ...

    def finish(self, products: Iterable[Product]) -> None:
        """Note that the step that is being planned computes the last stage of these."""
        ...

    def take_dropped(self) -> tuple[int, ...]:
        """Return the slots whose product the worker must drop; the caller passes them on."""
        ...

    def drop_unused(self, products: Iterable[Product]) -> None:
        """Drop those of some products that have no users."""
        ...

    def forget(self, slots: Iterable[int]) -> None:
        """Drop products that may not have been computed, because a step failed."""
        ...


class InputCache:
    """Maps the content of inputs to slots, counts their users, and evicts unused ones.

    Implements ``ProductCache``.

    An unused product stays until its memory is needed: the least recently used one goes first.
    ``InputRuns`` computes those that wait.

    Attributes:
        used_bytes: size of all products that are kept.
        num_images_found: how often a sequence found an image's features kept.
        waiting: products that nothing was computed of, in the order in which they are needed.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """``capacity_bytes`` bounds all products; a single larger one is taken alone."""
        self._capacity = capacity_bytes
        self._entries: OrderedDict[Hashable, Product] = OrderedDict()
        self._keys: dict[int, Hashable] = {}
        self._free_slots: list[int] = []
        self.used_bytes = 0
        self.num_images_found = 0
        self.waiting: dict[int, Product] = {}
        self._dropped: set[int] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def contains(self, key: Hashable) -> bool:
        """Return True if the product of this content is kept, or waits."""
        return key in self._entries

    def is_ready(self, slot: int) -> bool:
        """Return True if steps may name the product in a slot."""
        return self._entries[self._keys[slot]].is_ready

    def acquire(self, key: Hashable, source: ModelInput) -> int | None:
        """Return the slot of a product and count one more user of it.

        A product that is not kept waits to be computed. None if products in use leave no room for
        it.
        """
        entry = self._entries.get(key)
        if entry is None:
            if not self._make_room(source.nbytes):
                return None
            entry = self._add(key, source)
        else:
            self.num_images_found += source.kind is InputKind.IMAGE
        self._entries.move_to_end(key)
        entry.num_users += 1
        return entry.slot

    def release(self, slot: int) -> None:
        """Count one user of a slot less; a product that waits and has no other is dropped."""
        key = self._keys.get(slot)
        if key is not None:
            entry = self._entries[key]
            assert entry.num_users > 0, "a product is released more often than acquired"
            entry.num_users -= 1
            # One that is ready is computed before the next step, which may name it.
            if slot in self.waiting and not entry.num_users and not entry.is_ready:
                self._drop(key)

    def places(self, products: Iterable[Product]) -> tuple[SourcePlace, ...]:
        """See ``ProductCache``."""
        del products
        return ()

    def finish(self, products: Iterable[Product]) -> None:
        """See ``ProductCache``."""

    def take_dropped(self) -> tuple[int, ...]:
        """See ``ProductCache``."""
        dropped, self._dropped = tuple(sorted(self._dropped)), set()
        return dropped

    def drop_unused(self, products: Iterable[Product]) -> None:
        """See ``ProductCache``."""
        for product in products:
            key = self._keys.get(product.slot)
            if key is not None and self._entries[key] is product and not product.num_users:
                self._drop(key)

    def clear(self) -> None:
        """Drop all products without users."""
        for key in [key for key, entry in self._entries.items() if not entry.num_users]:
            self._drop(key)

    def forget(self, slots: Iterable[int]) -> None:
        """See ``ProductCache``."""
        for slot in slots:
            key = self._keys.get(slot)
            if key is None:
                continue
            if not self._entries[key].num_users:
                self._drop(key)
                continue
            # Its users fail with the step. No other request finds it under this key.
            self._keys[slot] = lost = object()
            self._entries[lost] = self._entries.pop(key)

    def check_integrity(self, num_users: int) -> None:
        """Assert that bytes, slots and users are accounted for; ``num_users`` of all sequences."""
        entries = self._entries.values()
        assert self.used_bytes == sum(entry.source.nbytes for entry in entries)
        assert num_users == sum(entry.num_users for entry in entries)
        slots = sorted([*(entry.slot for entry in entries), *self._free_slots])
        assert slots == list(range(len(slots))), "slots are lost"
        assert {entry.slot for entry in entries} == set(self._keys)
        waiting = self.waiting.values()
        assert all(entry.num_users or entry.is_ready for entry in waiting), "nobody needs a product"
        assert set(self.waiting) <= set(self._keys)

    def _make_room(self, nbytes: int) -> bool:
        unused = [key for key, entry in self._entries.items() if not entry.num_users]
        for key in unused:
            if self.used_bytes + nbytes <= self._capacity:
                return True
            self._drop(key)
        return not self._entries or self.used_bytes + nbytes <= self._capacity

    def _add(self, key: Hashable, source: ModelInput) -> Product:
        slot = heappop(self._free_slots) if self._free_slots else len(self._entries)
        entry = self._entries[key] = self.waiting[slot] = Product(source, slot)
        # An input that takes no time is computed before the next step.
        entry.is_ready = not source.cost
        self._keys[slot] = key
        self.used_bytes += source.nbytes
        return entry

    def _drop(self, key: Hashable) -> None:
        entry = self._entries.pop(key)
        del self._keys[entry.slot]
        heappush(self._free_slots, entry.slot)
        self.used_bytes -= entry.source.nbytes
        if self.waiting.pop(entry.slot, None) is None:
            self._dropped.add(entry.slot)
