"""Slots of snapshots: found by content, held, reserved, evicted, and never lost."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlx_parallm.generation.kv_cache.snapshots import StateSnapshots

FIRST_SLOT = 5


class Slots(RuleBasedStateMachine):
    """Compares slots with what a list of contents, the least recently used first, would have."""

    @initialize(num_slots=st.integers(1, 4))
    def start(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.snapshots = StateSnapshots(FIRST_SLOT, num_slots, state_bytes=10)
        self.slots: dict[bytes, int] = {}
        self.order: list[bytes] = []
        self.held = Counter[int]()
        self.reserved: list[int] = []

    @rule()
    def reserve(self) -> None:
        slot = self.snapshots.reserve()
        free = set(range(FIRST_SLOT, FIRST_SLOT + self.num_slots))
        free -= {*self.slots.values(), *self.held, *self.reserved}
        if free:
            assert slot in free
        else:
            evictable = [each for each in self.order if self.slots[each] not in self.held]
            assert slot == (self.slots[evictable[0]] if evictable else None)
            if evictable:
                self.forget(evictable[0])
        if slot is not None:
            self.reserved.append(slot)

    def forget(self, content: bytes) -> None:
        del self.slots[content]
        self.order.remove(content)

    @precondition(lambda self: bool(self.reserved))
    @rule(data=st.data(), content=st.sampled_from([b"a", b"b", b"c", b"d"]), passing=st.booleans())
    def commit(self, data: st.DataObject, content: bytes, *, passing: bool) -> None:
        slot = data.draw(st.sampled_from(self.reserved))
        self.snapshots.commit(slot, content, is_passing=passing)
        self.reserved.remove(slot)
        if content not in self.slots:
            self.slots[content] = slot
            self.order.insert(0 if passing else len(self.order), content)

    @precondition(lambda self: bool(self.reserved))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.reserved))
        self.snapshots.cancel(slot)
        self.reserved.remove(slot)

    @precondition(lambda self: bool(self.slots))
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        content = data.draw(st.sampled_from(sorted(self.slots)))
        assert self.snapshots.hold(content) == self.slots[content]
        self.held[self.slots[content]] += 1
        self.order.remove(content)
        self.order.append(content)

    @precondition(lambda self: bool(self.held))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.snapshots.release(slot)
        self.held -= Counter([slot])

    @precondition(lambda self: any(slot in self.held for slot in self.slots.values()))
    @rule(data=st.data())
    def forget_held(self, data: st.DataObject) -> None:
        contents = sorted(each for each, slot in self.slots.items() if slot in self.held)
        content = data.draw(st.sampled_from(contents))
        self.snapshots.forget(content)
        self.forget(content)

    @rule()
    def clear(self) -> None:
        self.snapshots.clear()
        self.slots.clear()
        self.order.clear()

    @invariant()
    def every_slot_is_somewhere_once(self) -> None:
        if hasattr(self, "snapshots"):
            self.snapshots.check_integrity(list(self.held.elements()), self.reserved)
            stats = self.snapshots.stats
            assert stats.num_used == len(self.slots)
            assert stats.used_bytes == 10 * len(self.slots)
            assert [self.snapshots.has(each) for each in (b"a", b"b", b"c", b"d")] == [
                each in self.slots for each in (b"a", b"b", b"c", b"d")
            ]


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
