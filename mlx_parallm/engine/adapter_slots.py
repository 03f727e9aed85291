"""The slots of adapters on the device; the least recently used idle one is evicted."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection

#: The slot of sequences without an adapter.
NO_ADAPTER = 0
# MAX_PASSED: sequences of other adapters that may start before one whose adapter finds no slot.
# Then no more sequences start of the adapter with the fewest running, so that it can be evicted.
MAX_PASSED = 16


class AdapterSlots:
    """Assigns slots, numbered from 1, to the contents of adapters.

    An adapter keeps its slot while no sequence uses it, until another adapter needs the slot. A
    pinned adapter is not evicted once it has a slot.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        # Slots by content, the least recently used first.
        self._slots: OrderedDict[str, int] = OrderedDict()
        self._users: Counter[str] = Counter()
        self._free = list(range(num_slots, 0, -1))
        self._pinned: frozenset[str] = frozenset()
        # Contents that wait for a slot, and how many sequences of others started since.
        self._passed: Counter[str] = Counter()

    @property
    def resident(self) -> Collection[str]:
        """The adapters with a slot, the least recently used first."""
        return self._slots.keys()

    @property
    def num_used(self) -> int:
        """Slots that running sequences use."""
        return sum(count > 0 for count in self._users.values())

    @property
    def blocked(self) -> Collection[str]:
        """Adapters that wait for a slot."""
        return self._passed.keys()

    def users(self, content: str) -> int:
        """Running sequences of an adapter."""
        return self._users[content]

    def slot_of(self, content: str) -> int:
        """Return the slot of an adapter that running sequences use."""
        return self._slots[content]

    def pin(self, contents: Collection[str]) -> None:
        """Pin these adapters, and no others."""
        self._pinned = frozenset(contents)

    def is_available(self, content: str) -> bool:
        """True if an adapter has a slot, or can be given one now."""
        return content in self._slots or bool(self._free) or self._idle() is not None

    def has_room(self, content: str) -> bool:
        """True if a sequence of this adapter may start; else the adapter is noted as waiting."""
        starving = self._starving()
        if starving is None or content == starving:
            has_room = self.is_available(content)
        else:
            has_room = content in self._slots and content != self._leaving()
        if not has_room:
            self._passed.setdefault(content, 0)
        return has_room

    def acquire(self, content: str) -> int:
        """Return the slot of an adapter, for one more sequence; ``has_room`` must be true."""
        slot = self._slots.get(content)
        if slot is None:
            if not self._free:
                idle = self._idle()
                assert idle is not None, "has_room was true"
                self.forget(idle)
            slot = self._slots[content] = self._free.pop()
        self._slots.move_to_end(content)
        self._users[content] += 1
        self._passed.pop(content, None)
        for other in self._passed:
            self._passed[other] += 1
        return slot

    def release(self, content: str) -> None:
        """Note that a sequence of an adapter has ended."""
        self._users[content] -= 1
        if not self._users[content]:
            del self._users[content]

    def forget(self, content: str) -> bool:
        """Free the slot of an adapter; False if sequences use it."""
        if self._users[content]:
            return False
        slot = self._slots.pop(content, None)
        if slot is not None:
            self._free.append(slot)
        return True

    def keep_waiting(self, contents: Collection[str]) -> None:
        """Note that only these adapters still wait for a slot."""
        for content in self._passed.keys() - set(contents):
            del self._passed[content]

    def check_integrity(self, used: Counter[str]) -> None:
        """Assert that the counts are those of running sequences, and that no slot is lost."""
        assert +self._users == +used, "users of adapters that do not run"
        slots = [*self._slots.values(), *self._free]
        assert sorted(slots) == list(range(1, self.num_slots + 1)), "a slot is lost"
        assert all(content in self._slots for content in +self._users)

    def _starving(self) -> str | None:
        """Return the adapter that waits too long for a slot; None if all slots are pinned."""
        if not self._passed or not (self._free or self._slots.keys() - self._pinned):
            return None
        content, count = self._passed.most_common(1)[0]
        return content if count >= MAX_PASSED else None

    def _leaving(self) -> str | None:
        """Return the adapter to evict for the one that starves; None while a slot is free."""
        movable = [content for content in self._slots if content not in self._pinned]
        # ``min`` returns the first of equals, which is the least recently used.
        return None if self._free else min(movable, key=self._users.__getitem__, default=None)

    def _idle(self) -> str | None:
        """Return the least recently used adapter that can be evicted; None if there is none."""
        for content in self._slots:
            if not self._users[content] and content not in self._pinned:
                return content
        return None
