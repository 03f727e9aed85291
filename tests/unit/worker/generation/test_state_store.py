"""States follow their slots, through groups that change and rows that are padding."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_parallm.types.errors import StepError
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.generation.cache_layout import StateLayout
from mlx_parallm.worker.generation.state_store import GroupStateCache, States, StateStore


def store_of(*num_entries: int) -> StateStore:
    """Return a store of the states of caches with so many arrays."""
    return StateStore([StateLayout((None,) * count) for count in num_entries])


def rows_of(store: StateStore, slots: Sequence[int], num_rows: int | None = None) -> list[float]:
    """Return the first number of every slot's state in the first cache."""
    array = store.fetch(slots, num_rows)[0][0]
    assert array.shape[0] == (num_rows or len(slots))
    return array[: len(slots), 0].tolist()


def full(value: float) -> States:
    return [[mx.full((1, 2), value)]]


def test_state_follows_its_slot_through_changing_groups() -> None:
    store = store_of(1)
    for slot in range(3):
        store.commit([slot], full(slot))
    states = store.fetch([2, 0, 1])
    group = GroupStateCache(states, 0)
    assert group[0].tolist() == [[2, 2], [0, 0], [1, 1]]
    group[0] = group[0] + 10
    group.commit()
    store.commit([2, 0, 1], states)
    assert store.fetch([2, 0, 1])[0][0] is group[0]
    assert rows_of(store, [1]) == [11]
    assert rows_of(store, [0, 2]) == [10, 12]


def test_copied_state_goes_its_own_way_and_a_fresh_slot_has_none() -> None:
    store = store_of(1)
    store.commit([0], full(0))
    store.copy(0, 1)
    store.commit([0], full(1))
    assert rows_of(store, [1]) == [0]
    assert store.reset(0) == [[None]]
    assert store.fetch([0]) == [[None]]
    with pytest.raises(ValueError, match="state"):
        store.fetch([0, 1])


def test_a_captured_state_stays_as_it_was() -> None:
    store = store_of(1)
    store.commit([0, 1], [[mx.array([[0.0, 0.0], [1.0, 1.0]])]])
    assert not store.capture(1, 7).item()
    store.commit([0, 1], [[mx.array([[2.0, 2.0], [3.0, 3.0]])]])
    assert rows_of(store, [7]) == [1]
    # It can be restored more than once, and is not changed by what follows.
    for slot in (0, 1):
        store.copy(7, slot)
        assert rows_of(store, [slot]) == [1]
        store.commit([slot], full(9))
    assert rows_of(store, [7]) == [1]


def test_a_captured_state_keeps_no_larger_array_alive() -> None:
    store = store_of(1)
    inputs = mx.zeros((1, 1 << 16, 4))
    mx.eval(inputs)
    gone = weakref.ref(inputs)
    store.commit([0], [[inputs[:, -3:]]])
    store.capture(0, 7)
    del inputs
    mx.eval(store.take_written())
    before = mx.get_active_memory()
    store.commit([0], full(0))
    assert gone() is None
    assert before - mx.get_active_memory() > 1_000_000
    assert store.fetch([7])[0][0].shape == (1, 3, 4)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("place", range(3))
def test_a_nan_is_found_wherever_it_is(dtype: mx.Dtype, place: int) -> None:
    store = store_of(2, 1, 1)
    arrays = [mx.ones((1, 5), dtype) for _ in range(3)]
    # States of n-grams are token ids.
    ids = mx.array([[1, 2, 3]])
    store.commit([0], [arrays[:2], [arrays[2]], [ids]])
    assert not store.capture(0, 7).item()
    arrays[place][0, 3] = mx.nan
    store.commit([0], [arrays[:2], [arrays[2]], [ids]])
    assert store.capture(0, 8).item()


def test_a_slot_without_a_state_cannot_be_captured() -> None:
    store = store_of(1)
    with pytest.raises(StepError, match="slot 3 has no state"):
        store.capture(3, 7)


def test_whoever_left_the_end_of_a_padded_batch_keeps_none_of_the_others_rows() -> None:
    store = store_of(1)
    first = [[mx.arange(8.0).reshape(4, 2)]]
    gone = weakref.ref(first[0][0])
    store.commit(range(4), first, 4)
    del first
    # The batch is as long as before, and its last row is padding now.
    states = store.fetch([0, 1, 2], 4)
    store.commit([0, 1, 2], [[states[0][0] + 10]], 4)
    del states
    mx.eval(store.take_written())
    assert gone() is None
    assert rows_of(store, [3]) == [6]
    assert rows_of(store, [0, 1, 2], 4) == [10, 12, 14]


def test_a_group_that_stays_the_same_copies_nothing() -> None:
    store = store_of(2, 1)
    kept: States = [[mx.zeros((4, 2)), None], [mx.ones((4, 3))]]
    store.commit([5, 1, 7], kept, 4)
    store.take_written()
    for _ in range(2):
        states = store.fetch([5, 1, 7], 4)
        assert [
            before is kept_array for before, kept_array in zip(states[0], kept[0], strict=True)
        ] == [True] * 2
        assert states[1][0] is kept[1][0]
        store.commit([5, 1, 7], states, 4)
    assert len(store.take_written()) == 4
    # A model that has no states is never asked for any.
    assert store_of().fetch([0, 1]) == []


def test_what_is_fetched_may_be_changed_in_place() -> None:
    store = store_of(1)
    store.commit([0], full(3))
    store.fetch([0])[0][0] = None
    assert rows_of(store, [0]) == [3]


def test_the_rows_of_others_do_not_keep_an_array_that_is_retired() -> None:
    store = store_of(1)
    whole = mx.arange(8.0).reshape(4, 2)
    store.commit([0, 1, 2, 3], [[whole]])
    store.take_written()
    store.fetch([0, 1])
    # Slots 2 and 3 have rows of their own now, to be computed with the step.
    assert [array.tolist() for array in store.take_written()] == [[[4, 5]], [[6, 7]]]
    assert rows_of(store, [3, 2]) == [6, 4]


ROW_COUNTS = st.integers(0, 3)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["run", "copy", "reset"]), st.permutations(list(range(5))), ROW_COUNTS
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_any_order_of_steps_keeps_every_slots_own_state(
    steps: list[tuple[str, list[int], int]],
) -> None:
    """Each slot counts its steps; a dictionary says what it should have."""
    store, wanted = store_of(1, 1), dict[int, float]()
    for kind, order, extra in steps:
        first, second, *_ = order
        if kind == "copy" and first in wanted:
            store.copy(first, second)
            wanted[second] = wanted[first]
        elif kind == "reset":
            fresh = store.reset(first)
            assert fresh == [[None], [None]]
            store.commit([first], [[mx.full((1, 2), 100.0 * first)]] * 2)
            wanted[first] = 100.0 * first
        elif kind == "run":
            slots = [slot for slot in order if slot in wanted][: 1 + extra]
            if not slots:
                continue
            num_rows = len(slots) + extra
            states = store.fetch(slots, num_rows)
            store.commit(slots, [[entry + 1 for entry in arrays] for arrays in states], num_rows)
            for slot in slots:
                wanted[slot] += 1
    for slot, value in wanted.items():
        assert rows_of(store, [slot]) == [value]


def counted_store(
    counts: Sequence[int], num_rows: int = 4
) -> tuple[StateStore, list[list[int]], list[ScheduledSequence]]:
    """Return a store whose group has states of their numbers of tokens, and which were made."""
    store, made = store_of(1), list[list[int]]()

    def make(after: Sequence[int]) -> States:
        made.append(list(after))
        return [[mx.array([[10.0 * row + count] for row, count in enumerate(after)])]]

    rows = [
        ScheduledSequence(
            seq_id=slot,
            slot=slot,
            start=9,
            token_ids=(0,) * count,
            block_table=(),
            kept_slots=tuple(range(100 * slot + 100, 100 * slot + 99 + count)),
        )
        for slot, count in enumerate(counts)
    ]
    store.commit_rows(rows, make, num_rows, 5)
    return store, made, rows


def values_of(store: StateStore, slots: Sequence[int], num_rows: int | None = None) -> list[float]:
    [[array]] = store.fetch(slots, num_rows)
    return [float(value) for value in array[:, 0].tolist()]


def test_states_of_rows_are_made_once_and_stay_together() -> None:
    store, made, _ = counted_store([5, 3, 1])
    store.copy(101, 0)
    store.copy(200, 1)
    store.drop_kept()
    assert made == []
    # No row is gathered: the padding is that of the group.
    assert values_of(store, [0, 1, 2], 4) == [2, 11, 21, 35]
    assert made == [[2, 1, 1, 5]]


def test_a_state_that_another_slot_has_stays() -> None:
    store, made, _ = counted_store([5, 5], num_rows=2)
    store.copy(0, 7)
    # The copy of slot 0 has read the states, so others are made for what is taken back.
    store.copy(103, 0)
    store.copy(202, 1)
    store.copy(201, 8)
    assert values_of(store, [7]) == [5]
    assert values_of(store, [0, 1]) == [4, 13]
    assert values_of(store, [8]) == [12]
    assert made == [[5, 5], [4, 3], [4, 2]]


def test_a_group_of_one_row_is_copied_before_it_is_taken_back() -> None:
    store, _, _ = counted_store([5], num_rows=1)
    store.copy(0, 7)
    store.copy(100, 0)
    assert (values_of(store, [7]), values_of(store, [0])) == ([5], [1])


def test_what_was_taken_back_in_a_later_step_leaves_the_others() -> None:
    store, _, _ = counted_store([5, 5, 1], num_rows=4)
    store.drop_kept()
    assert values_of(store, [2]) == [21]
    store.copy(101, 0)
    store.drop_kept()
    assert values_of(store, [0, 1]) == [2, 15]
    store.copy(200, 1)
    # Kept states last for two steps.
    assert store.peek(1) is None
