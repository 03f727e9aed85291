"""Slots of adapters: the least recently used one is evicted, and no adapter starves."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.engine.adapter_slots import MAX_PASSED, AdapterSlots


def test_an_idle_adapter_keeps_its_slot_until_another_needs_it() -> None:
    slots = AdapterSlots(2)
    first, second = slots.acquire("a"), slots.acquire("b")
    assert {first, second} == {1, 2}
    slots.release("a")
    assert slots.acquire("a") == first
    slots.release("a")
    slots.release("b")
    # "a" was used later than "b".
    slots.acquire("a")
    slots.release("a")
    assert slots.acquire("c") == second
    assert set(slots.resident) == {"a", "c"}


def test_a_used_slot_is_nobody_elses() -> None:
    slots = AdapterSlots(1)
    slots.acquire("a")
    assert not slots.has_room("b")
    assert slots.has_room("a")
    assert not slots.forget("a")
    slots.release("a")
    assert slots.has_room("b")
    assert slots.forget("a")
    assert list(slots.resident) == []


def test_a_pinned_adapter_keeps_its_slot() -> None:
    slots = AdapterSlots(1)
    slots.pin(["a"])
    slots.acquire("a")
    slots.release("a")
    assert not slots.has_room("b")
    slots.pin([])
    assert slots.has_room("b")


def test_who_is_passed_by_too_often_gets_the_next_slot() -> None:
    slots = AdapterSlots(1)
    slots.acquire("a")
    assert not slots.has_room("b")
    for _ in range(MAX_PASSED):
        assert slots.has_room("a")
        slots.acquire("a")
        slots.release("a")
    assert not slots.has_room("a")
    slots.release("a")
    assert not slots.has_room("a")
    assert slots.has_room("b")
    slots.acquire("b")
    slots.release("b")
    assert slots.has_room("a")


def test_one_adapter_makes_way_for_who_starves_and_the_others_go_on() -> None:
    slots = AdapterSlots(3)
    slots.pin(["pinned"])
    for content in ("pinned", "many", "many", "few"):
        slots.acquire(content)
    assert not slots.has_room("b")
    for _ in range(MAX_PASSED):
        slots.acquire("many")
    assert [slots.has_room(name) for name in ("pinned", "many", "few", "c")] == [
        True,
        True,
        False,
        False,
    ]
    slots.release("few")
    # Its slot is for nobody else.
    assert not slots.has_room("few")
    assert not slots.has_room("c")
    assert slots.has_room("b")
    slots.acquire("b")
    assert "few" not in slots.resident


def test_who_waits_no_more_holds_nobody_up() -> None:
    slots = AdapterSlots(1)
    slots.acquire("a")
    slots.has_room("b")
    for _ in range(MAX_PASSED):
        slots.acquire("a")
    assert not slots.has_room("a")
    slots.keep_waiting([])
    assert slots.has_room("a")


def test_nobody_is_held_up_for_a_slot_that_cannot_be_had() -> None:
    slots = AdapterSlots(1)
    slots.pin(["a"])
    slots.acquire("a")
    slots.has_room("b")
    for _ in range(2 * MAX_PASSED):
        assert slots.has_room("a")
        slots.acquire("a")


@given(
    num_slots=st.integers(1, 4),
    moves=st.lists(
        st.tuples(st.sampled_from(["start", "stop", "forget", "pin"]), st.sampled_from("abcdef"))
    ),
)
def test_slots_are_never_lost_or_shared(num_slots: int, moves: list[tuple[str, str]]) -> None:
    slots = AdapterSlots(num_slots)
    running: Counter[str] = Counter()
    held: dict[str, int] = {}
    for move, name in moves:
        if move == "start" and slots.has_room(name):
            slot = slots.acquire(name)
            assert held.get(name, slot) == slot, "moved while it ran"
            held[name] = slot
            running[name] += 1
        elif move == "stop" and running[name]:
            slots.release(name)
            running[name] -= 1
            if not running[name]:
                del held[name]
        elif move == "forget":
            assert slots.forget(name) == (not running[name])
        elif move == "pin":
            slots.pin([name] if num_slots > 1 else [])
        assert len(set(held.values())) == len(held)
        slots.check_integrity(running)
