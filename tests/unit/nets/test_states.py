"""Kept states of sequences: their owners, their bounds, and their ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.nets.states import KeptState, SequenceStates, StateLimits
from mlx_parallm.types.errors import ConflictError
from mlx_parallm.types.nets import SequenceUse

LIMITS = StateLimits(count=8, num_bytes=1 << 20, age_s=10.0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def use(owner: str, name: str, **flags: bool) -> SequenceUse:
    return SequenceUse(owner=owner, sequence_id=name, **flags)


def state(number: float = 0.0, rows: int = 1, used_s: float = 0.0) -> KeptState:
    arrays = {"lstm.h": np.full((rows, 4), number, np.float32)}
    return KeptState(arrays, rows, "v0", has_other_weights=False, used_s=used_s)


def test_a_sequence_goes_on_where_it_ended() -> None:
    states = SequenceStates(LIMITS, Clock())
    assert states.get(use("a", "s", is_start=True), 1) is None
    states.put(use("a", "s"), state(1.0))
    kept = states.get(use("a", "s"), 1)
    assert kept is not None
    assert kept.arrays["lstm.h"][0, 0] == 1.0
    states.put(use("a", "s", is_end=True), state(2.0))
    with pytest.raises(ConflictError, match="sequence 's'"):
        states.get(use("a", "s"), 1)
    assert (len(states), states.num_bytes) == (0, 0)


def test_owners_do_not_share_names() -> None:
    states = SequenceStates(LIMITS, Clock())
    states.put(use("a", "s"), state(1.0))
    with pytest.raises(ConflictError):
        states.get(use("b", "s"), 1)


def test_other_numbers_of_rows_are_refused() -> None:
    states = SequenceStates(LIMITS, Clock())
    states.put(use("a", "s"), state(rows=2))
    with pytest.raises(ConflictError, match="2 rows, and the request 3"):
        states.get(use("a", "s"), 3)


def test_a_start_replaces_what_was_kept() -> None:
    states = SequenceStates(LIMITS, Clock())
    states.put(use("a", "s"), state(rows=2))
    assert states.get(use("a", "s", is_start=True), 3) is None
    states.put(use("a", "s", is_start=True), state(rows=3))
    assert len(states) == 1


def test_sequences_that_are_not_used_are_dropped() -> None:
    clock = Clock()
    states = SequenceStates(LIMITS, clock)
    states.put(use("a", "old"), state())
    clock.now_s = 9.0
    states.put(use("a", "new"), state(used_s=9.0))
    clock.now_s = 10.5
    with pytest.raises(ConflictError, match="10 s"):
        states.get(use("a", "old"), 1)
    assert states.get(use("a", "new"), 1) is not None
    assert states.num_dropped == 1


def test_a_client_beyond_its_half_loses_its_own() -> None:
    states = SequenceStates(LIMITS, Clock())
    states.put(use("b", "first"), state())
    for number in range(10_000):
        states.put(use("a", str(number)), state())
    assert states.get(use("b", "first"), 1) is not None
    assert states.get(use("a", "9999"), 1) is not None
    assert len(states) == 1 + LIMITS.count // 2


def test_states_that_are_too_large_are_not_kept() -> None:
    states = SequenceStates(replace(LIMITS, num_bytes=100), Clock())
    states.put(use("a", "s"), state(rows=8))
    assert (len(states), states.num_bytes) == (0, 0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from("uvwxyz"),
            st.integers(1, 6),
            st.booleans(),
            st.integers(0, 4),
        ),
        max_size=60,
    )
)
def test_bounds_hold_after_every_request(steps: list[tuple[str, str, int, bool, int]]) -> None:
    clock = Clock()
    limits = StateLimits(count=6, num_bytes=300, age_s=10.0)
    states = SequenceStates(limits, clock)
    for owner, name, rows, is_end, passed in steps:
        clock.now_s += passed
        own = use(owner, name, is_start=True, is_end=is_end)
        assert states.get(own, rows) is None
        states.put(own, state(rows=rows, used_s=clock.now_s))
        assert len(states) <= limits.count
        assert states.num_bytes <= limits.num_bytes
    for owner in "abc":
        for name in "uvwxyz":
            states.put(use(owner, name, is_end=True), state())
    assert (len(states), states.num_bytes) == (0, 0)
