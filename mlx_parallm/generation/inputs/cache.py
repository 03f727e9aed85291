"""Which products of inputs are kept on the device, and in which slot."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from heapq import heappop, heappush

from mlx_parallm.types.model_input import InputChanges, InputKind, ModelInput


@dataclass(slots=True)
class _Entry:
    """A product: its slot, its size, and how many sequences need it now."""

    slot: int
    nbytes: int
    num_users: int = 0


class InputCache:
    """Maps the content of inputs to slots, counts their users, and evicts unused ones.

    An unused product stays until its memory is needed: the least recently used one goes first. The
    changes are applied by the worker before the next step, see ``take_changes``.

    Attributes:
        used_bytes: size of all products that are kept.
        num_pictures_computed: how often a picture's features were computed so far.
        num_pictures_found: how often a sequence found them kept.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """``capacity_bytes`` bounds all products; a single larger one is taken alone."""
        self._capacity = capacity_bytes
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()
        self._keys: dict[int, Hashable] = {}
        self._free_slots: list[int] = []
        self.used_bytes = 0
        self.num_pictures_computed = 0
        self.num_pictures_found = 0
        self._dropped: set[int] = set()
        self._computed: dict[int, ModelInput] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def contains(self, key: Hashable) -> bool:
        """Return True if the product of this content is kept."""
        return key in self._entries

    def acquire(self, key: Hashable, source: ModelInput) -> int | None:
        """Return the slot of a product and count one more user of it.

        A product that is not kept is computed before the next step. None if products in use leave
        no room for it.
        """
        entry, is_picture = self._entries.get(key), source.kind is InputKind.PICTURE
        if entry is None:
            if not self._make_room(source.nbytes):
                return None
            entry = self._add(key, source)
            self.num_pictures_computed += is_picture
        else:
            self.num_pictures_found += is_picture
        self._entries.move_to_end(key)
        entry.num_users += 1
        return entry.slot

    def release(self, slot: int) -> None:
        """Count one user of a slot less."""
        key = self._keys.get(slot)
        if key is not None:
            entry = self._entries[key]
            assert entry.num_users > 0, "a product is released more often than acquired"
            entry.num_users -= 1

    def take_changes(self) -> InputChanges:
        """Return what the worker must do before the next step; the caller passes it on."""
        changes = InputChanges(dropped=tuple(sorted(self._dropped)), computed=self._computed)
        self._dropped, self._computed = set(), {}
        return changes

    def clear(self) -> None:
        """Drop all products without users."""
        for key in [key for key, entry in self._entries.items() if not entry.num_users]:
            self._drop(key)

    def forget(self, changes: InputChanges) -> None:
        """Drop the products of a step that failed: they may not have been computed."""
        for slot in changes.computed:
            key = self._keys.get(slot)
            if key is None:
                continue
            if not self._entries[key].num_users:
                self._drop(key)
                continue
            # Its users fail with their steps. No other request finds it under this key.
            self._keys[slot] = lost = object()
            self._entries[lost] = self._entries.pop(key)

    def check_integrity(self, num_users: int) -> None:
        """Assert that bytes, slots and users are accounted for; ``num_users`` of all sequences."""
        entries = self._entries.values()
        assert self.used_bytes == sum(entry.nbytes for entry in entries)
        assert num_users == sum(entry.num_users for entry in entries)
        slots = sorted([*(entry.slot for entry in entries), *self._free_slots])
        assert slots == list(range(len(slots))), "slots are lost"
        assert {entry.slot for entry in entries} == set(self._keys)

    def _make_room(self, nbytes: int) -> bool:
        unused = [key for key, entry in self._entries.items() if not entry.num_users]
        for key in unused:
            if self.used_bytes + nbytes <= self._capacity:
                return True
            self._drop(key)
        return not self._entries or self.used_bytes + nbytes <= self._capacity

    def _add(self, key: Hashable, source: ModelInput) -> _Entry:
        slot = heappop(self._free_slots) if self._free_slots else len(self._entries)
        entry = self._entries[key] = _Entry(slot, source.nbytes)
        self._keys[slot] = key
        self.used_bytes += source.nbytes
        self._dropped.discard(slot)
        self._computed[slot] = source
        return entry

    def _drop(self, key: Hashable) -> None:
        entry = self._entries.pop(key)
        del self._keys[entry.slot]
        heappush(self._free_slots, entry.slot)
        self.used_bytes -= entry.nbytes
        if self._computed.pop(entry.slot, None) is None:
            self._dropped.add(entry.slot)
