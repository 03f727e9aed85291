"""Snapshots: the states of recurrent and convolution layers after cached prefixes, by content."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotStats:
    """Counts of snapshots.

    Attributes:
        num_slots: how many there may be.
        num_used: how many there are.
        state_bytes: size of one.
        num_captured: how many were made so far.
        num_evicted: how many of these were evicted for others.
    """

    num_slots: int = 0
    num_used: int = 0
    state_bytes: int = 0
    num_captured: int = 0
    num_evicted: int = 0

    @property
    def used_bytes(self) -> int:
        """Memory that they take."""
        return self.num_used * self.state_bytes


class StateSnapshots:
    """Every slot is free, reserved for a capture, or has a snapshot, exactly once.

    A snapshot is found by the content of the block that its prefix ends with. It can be held, so
    that it is not evicted. At the limit, the least recently used one that is not held is evicted;
    those in the middle of prompts go first.

    The slots are rows of per-sequence state in the runner, beside those of running sequences. Only
    numbers are kept here.
    """

    def __init__(self, first_slot: int, num_slots: int, state_bytes: int = 0) -> None:
        """Begin without snapshots.

        Args:
            first_slot: the number of the first slot; running sequences have those before it.
            num_slots: the most snapshots.
            state_bytes: the size of one.
        """
        self._range = range(first_slot, first_slot + num_slots)
        self._state_bytes = state_bytes
        self._free = list(self._range)
        self._reserved: set[int] = set()
        # Slots by content, the least recently used first.
        self._by_content: OrderedDict[bytes, int] = OrderedDict()
        # Slots without a content remain held until their last holder releases them.
        self._holders = Counter[int]()
        self._forgotten: set[int] = set()
        self._num_captured = self._num_evicted = 0

    def find(self, content: bytes) -> int | None:
        """Return the slot of the snapshot after the prefix that ends with this block."""
        return self._by_content.get(content)

    def has(self, content: bytes) -> bool:
        """Return True if there is a snapshot after the prefix that ends with this block."""
        return content in self._by_content

    def hold(self, content: bytes) -> int:
        """Return the slot of a snapshot, which counts as used and stays until ``release``."""
        self._by_content.move_to_end(content)
        slot = self._by_content[content]
        self._holders[slot] += 1
        return slot

    def release(self, slot: int) -> None:
        """Let a snapshot be evicted again, once for each ``hold``."""
        assert self._holders[slot] > 0, "a snapshot is released that is not held"
        self._holders[slot] -= 1
        if not self._holders[slot]:
            del self._holders[slot]
            if slot in self._forgotten:
                self._forgotten.remove(slot)
                heapq.heappush(self._free, slot)

    def forget(self, content: bytes) -> None:
        """Let a held snapshot not be found any more; its slot is free once it is released."""
        self._forgotten.add(self._by_content.pop(content))

    @property
    def victim(self) -> int | None:
        """Return the slot that ``reserve`` would take from a snapshot; None if it takes none."""
        content = self._next_evicted()
        return None if content is None else self._by_content[content]

    def _next_evicted(self) -> bytes | None:
        if self._free:
            return None
        return next((c for c, s in self._by_content.items() if s not in self._holders), None)

    def reserve(self) -> int | None:
        """Return a slot for a capture; None if all are reserved or held."""
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            content = self._next_evicted()
            if content is None:
                return None
            slot = self._by_content.pop(content)
            self._num_evicted += 1
        self._reserved.add(slot)
        return slot

    def commit(self, slot: int, content: bytes, *, is_passing: bool = False) -> None:
        """Let a reserved slot be found by ``content``; an earlier snapshot of it stays instead.

        ``is_passing``: the prefix ends in the middle of a prompt, and is evicted before others.
        """
        if content in self._by_content:
            self.cancel(slot)
            return
        self._reserved.remove(slot)
        self._by_content[content] = slot
        self._num_captured += 1
        if is_passing:
            self._by_content.move_to_end(content, last=False)

    def cancel(self, slot: int) -> None:
        """Give back a reserved slot."""
        self._reserved.remove(slot)
        heapq.heappush(self._free, slot)

    def clear(self) -> None:
        """Let no snapshot be found; held slots and reserved ones stay so."""
        for slot in self._by_content.values():
            if slot in self._holders:
                self._forgotten.add(slot)
            else:
                heapq.heappush(self._free, slot)
        self._by_content.clear()

    @property
    def stats(self) -> SnapshotStats:
        """Return how many there are, and counters."""
        return SnapshotStats(
            num_slots=len(self._range),
            num_used=len(self._by_content),
            state_bytes=self._state_bytes,
            num_captured=self._num_captured,
            num_evicted=self._num_evicted,
        )

    def check_integrity(self, held: Sequence[int], reserved: Sequence[int]) -> None:
        """Assert the invariants, given the slots that tables hold and that captures fill."""
        assert Counter(held) == self._holders, "a snapshot is held by another number of tables"
        assert sorted(reserved) == sorted(self._reserved), "a reserved slot is not to be filled"
        places = [*self._free, *self._reserved, *self._by_content.values(), *self._forgotten]
        assert sorted(places) == list(self._range), "a slot is nowhere, or in two places"
        assert self._forgotten <= set(self._holders)
