"""Snapshots: the states of recurrent and convolution layers after cached prefixes, by content."""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

# PASSING_SHARE: snapshots that are probably not asked for again keep one in so many slots. It makes
# 1.3 of what the best cache of whole chats computes of 64 chats over 16 slots, and without it 2.4.
PASSING_SHARE = 8


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


#: ``NO_SNAPSHOTS``: those of a model that keeps none.
NO_SNAPSHOTS = SnapshotStats()


@dataclass(slots=True)
class _Snapshot:
    """A snapshot that can be found.

    Attributes:
        slot: its slot.
        is_end: True if it was made at the end of a prompt.
        num_uses: how often it was found.
    """

    slot: int
    is_end: bool
    num_uses: int = 0


class StateSnapshots:
    """Every slot is free, reserved for a capture, or has a snapshot, exactly once.

    A snapshot is found by the content of the block that its prefix ends with. It can be held, so
    that it is not evicted. Those that are passing, from within prompts or followed by later ones of
    their chat, have an eighth of the slots, so that new prompts evict each other's first. The
    least recently used one is evicted, of the passing ones and of the others alike.

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
        # By content, the least recently used first.
        self._kept: OrderedDict[bytes, _Snapshot] = OrderedDict()
        self._passing: OrderedDict[bytes, _Snapshot] = OrderedDict()
        # Slots without a content remain held until their last holder releases them.
        self._holders = Counter[int]()
        self._forgotten: set[int] = set()
        self._num_captured = self._num_evicted = 0

    def _get(self, content: bytes) -> _Snapshot | None:
        return self._kept.get(content) or self._passing.get(content)

    def _pop(self, content: bytes) -> _Snapshot:
        """Let a snapshot not be found."""
        return (self._kept if content in self._kept else self._passing).pop(content)

    def find(self, content: bytes) -> int | None:
        """Return the slot of the snapshot after the prefix that ends with this block."""
        snapshot = self._get(content)
        return None if snapshot is None else snapshot.slot

    def has(self, content: bytes) -> bool:
        """Return True if there is a snapshot after the prefix that ends with this block."""
        return content in self._kept or content in self._passing

    def hold(self, content: bytes) -> int:
        """Return the slot of a snapshot, which counts as used and stays until ``release``."""
        snapshot = self._kept[content] = self._pop(content)
        snapshot.num_uses += 1
        self._holders[snapshot.slot] += 1
        return snapshot.slot

    def follow(self, content: bytes) -> None:
        """Note that a prompt that began with a snapshot has one at its own end.

        The next turn of a chat begins with the latter. A snapshot that was found by several prompts
        is the beginning of more than one chat.
        """
        snapshot = self._kept.get(content)
        if snapshot is not None and snapshot.is_end and snapshot.num_uses == 1:
            self._passing[content] = self._kept.pop(content)
            self._passing.move_to_end(content, last=False)

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
        self._forgotten.add(self._pop(content).slot)

    @property
    def victim(self) -> int | None:
        """Return the slot that ``reserve`` would take from a snapshot; None if it takes none."""
        content = None if self._free else self._least_wanted()
        return None if content is None else self.find(content)

    @property
    def is_busy(self) -> bool:
        """Return True if all slots would be reserved with one more."""
        return len(self._reserved) + 1 >= len(self._range)

    def reserve(self) -> int | None:
        """Return a slot for a capture; None if all are reserved or held."""
        if self._free:
            slot = heapq.heappop(self._free)
        else:
            content = self._least_wanted()
            if content is None:
                return None
            slot = self._pop(content).slot
            self._num_evicted += 1
        self._reserved.add(slot)
        return slot

    def _least_wanted(self) -> bytes | None:
        """Return the content of the snapshot to evict; None if all are held."""
        is_crowded = len(self._passing) > len(self._range) // PASSING_SHARE
        order = (self._passing, self._kept) if is_crowded else (self._kept, self._passing)
        snapshots = chain.from_iterable(each.items() for each in order)
        return next((key for key, each in snapshots if each.slot not in self._holders), None)

    def commit(self, slot: int, content: bytes, *, is_passing: bool = False) -> None:
        """Let a reserved slot be found by ``content``; an earlier snapshot of it stays instead.

        ``is_passing``: the prefix ends within a prompt.
        """
        if self.has(content):
            self.cancel(slot)
            return
        self._reserved.remove(slot)
        snapshots = self._passing if is_passing else self._kept
        snapshots[content] = _Snapshot(slot, is_end=not is_passing)
        self._num_captured += 1

    def cancel(self, slot: int) -> None:
        """Give back a reserved slot."""
        self._reserved.remove(slot)
        heapq.heappush(self._free, slot)

    def clear(self) -> None:
        """Let no snapshot be found; held slots and reserved ones stay so."""
        for slot in self._slots():
            if slot in self._holders:
                self._forgotten.add(slot)
            else:
                heapq.heappush(self._free, slot)
        self._kept.clear()
        self._passing.clear()

    def _slots(self) -> list[int]:
        """Return the slots of all snapshots that can be found."""
        return [each.slot for each in (*self._kept.values(), *self._passing.values())]

    @property
    def stats(self) -> SnapshotStats:
        """Return how many there are, and counters."""
        return SnapshotStats(
            num_slots=len(self._range),
            num_used=len(self._kept) + len(self._passing),
            state_bytes=self._state_bytes,
            num_captured=self._num_captured,
            num_evicted=self._num_evicted,
        )

    def check_integrity(self, held: Sequence[int], reserved: Sequence[int]) -> None:
        """Assert the invariants, given the slots that tables hold and that captures fill."""
        assert Counter(held) == self._holders, "a snapshot is held by another number of tables"
        assert sorted(reserved) == sorted(self._reserved), "a reserved slot is not to be filled"
        places = [*self._free, *self._reserved, *self._slots(), *self._forgotten]
        assert sorted(places) == list(self._range), "a slot is nowhere, or in two places"
        assert self._forgotten <= set(self._holders)
