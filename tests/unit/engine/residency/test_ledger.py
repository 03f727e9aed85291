"""Promised bytes: claims beside each other, limits of kinds, and what is missing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.engine.kind import MemoryLimit
from mlx_parallm.engine.ledger import KV, WEIGHTS, Claim, Lack, Ledger

POOLING = MemoryLimit(50, "Pooling models", "--pooling-memory-bytes")


def claim(model: str, num_bytes: int, what: str = WEIGHTS, kind: str = "generation") -> Claim:
    return Claim(model=model, kind=kind, what=what, num_bytes=num_bytes)


def test_claims_take_room_until_they_are_released() -> None:
    ledger = Ledger({}, 100)
    ledger.promise(claim("a", 30))
    ledger.promise(claim("a", 20, KV))
    assert (ledger.promised, ledger.room(claim("b", 0))) == (50, 50)
    assert ledger.lack(claim("b", 60)) == Lack(total=10)
    assert not ledger.lack(claim("b", 50))
    ledger.release("a", KV)
    assert (ledger.num_bytes("a", KV), ledger.num_bytes("a", WEIGHTS)) == (0, 30)
    ledger.release("a")
    assert (ledger.promised, ledger.claims()) == (0, [])


def test_a_claim_replaces_an_earlier_one_of_the_same_part() -> None:
    ledger = Ledger({}, 100)
    ledger.promise(claim("a", 90, KV))
    assert ledger.room(claim("a", 0, KV)) == 100
    ledger.promise(claim("a", 100, KV))
    assert ledger.promised == 100


def test_more_than_there_is_cannot_be_promised() -> None:
    ledger = Ledger({}, 100)
    with pytest.raises(AssertionError, match="no room"):
        ledger.promise(claim("a", 101))
    assert not ledger.claims()


def test_a_kind_has_a_limit_of_its_own_on_weights() -> None:
    ledger = Ledger({"pooling": POOLING}, 100)
    ledger.promise(claim("a", 40, kind="pooling"))
    ledger.promise(claim("a", 20, KV, kind="pooling"))
    ledger.promise(claim("b", 40))
    assert ledger.lack(claim("c", 20, kind="pooling")) == Lack(total=20, of_kind=10)
    assert ledger.lack(claim("c", 20, KV, kind="pooling")) == Lack(total=20)
    assert ledger.room(claim("c", 0, kind="pooling")) == 0
    ledger.release("b")
    assert ledger.room(claim("c", 0, kind="pooling")) == 10
    assert ledger.room(claim("c", 0)) == 40


def test_what_others_would_give_back_is_told_by_limit() -> None:
    ledger = Ledger({"pooling": POOLING}, 100)
    ledger.promise(claim("a", 40, kind="pooling"))
    ledger.promise(claim("b", 60))
    wanted = claim("c", 30, kind="pooling")
    lack = ledger.lack(wanted)
    assert lack == Lack(total=30, of_kind=20)
    assert lack.without(ledger.claims("b"), wanted) == Lack(total=0, of_kind=20)
    assert lack.without(ledger.claims("a"), wanted) == Lack()


def test_without_a_limit_there_is_room_for_any() -> None:
    ledger = Ledger({})
    assert ledger.room(claim("a", 1)) is None
    assert not ledger.lack(claim("a", 10**15))


def test_a_limit_below_what_was_granted_at_the_start_is_that() -> None:
    ledger = Ledger({})
    ledger.restart([claim("a", 80)], 50)
    assert (ledger.limit, ledger.room(claim("b", 0))) == (80, 0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from([WEIGHTS, KV]),
            st.sampled_from(["pooling", "generation"]),
            st.integers(0, 120),
            st.booleans(),
        )
    )
)
def test_promises_never_exceed_a_limit(
    history: list[tuple[str, str, str, int, bool]],
) -> None:
    ledger = Ledger({"pooling": POOLING}, 100)
    for model, what, kind, num_bytes, releases in history:
        each = claim(model, num_bytes, what, kind)
        room = ledger.room(each)
        assert room is not None
        assert bool(ledger.lack(each)) == (num_bytes > room)
        if releases:
            ledger.release(model)
        elif num_bytes <= room:
            ledger.promise(each)
        of_kind = [
            part for part in ledger.claims() if (part.kind, part.what) == ("pooling", WEIGHTS)
        ]
        assert ledger.promised <= 100
        assert sum(part.num_bytes for part in of_kind) <= POOLING.num_bytes
