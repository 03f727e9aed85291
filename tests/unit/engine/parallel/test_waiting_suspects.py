"""Suspects wait for an engine that may die of them, and are computed one at a time."""

from __future__ import annotations

import pytest

from mlx_parallm.engine.commands import Abort
from mlx_parallm.engine.parallel import dispatcher as dispatcher_module
from mlx_parallm.types.errors import OverloadedError, RequestAbortedError, RequestLostError
from tests.fleet_harness import Die, FakeFleet
from tests.unit.engine.parallel.dying_fleets import end, errors, finish, held, kill_with, rank_of


def test_the_last_engine_gets_no_suspect_and_the_second_death_ends_it(two: FakeFleet) -> None:
    assert two.submit("a") is None
    first = rank_of(two, "a")
    two.leave_dead(first)
    assert "a" not in two.lives[1 - first].requests
    # Others are answered meanwhile.
    assert two.submit("innocent") is None
    assert finish(two) == {"innocent"}
    two.revive(first)
    two.kill(rank_of(two, "a"))
    assert errors(two) == {"a": RequestLostError}


@pytest.mark.parametrize("num_samples", [1, 4])
@pytest.mark.parametrize("is_notified", [True, False])
def test_a_suspect_that_waits_can_be_ended(
    two: FakeFleet, num_samples: int, is_notified: bool
) -> None:
    assert two.submit("a", num_samples) is None
    two.leave_dead(first := rank_of(two, next(iter(two.router.placements))))
    two.abort("a", is_notified=is_notified)
    while is_notified and not two.events:
        pass
    two.revive(first)
    assert errors(two) == ({"a": RequestAbortedError} if is_notified else {})
    assert not any(life.requests for life in two.lives)


def test_suspects_do_not_wait_for_an_engine_that_cannot_be_started(two: FakeFleet) -> None:
    assert two.submit("a") is None
    two.leave_dead(first := rank_of(two, "a"))
    again = two.begin("again", prompt="a")
    life = two.lives[first]
    life.fails_to_load = True
    life.may_load.set()
    assert isinstance(again.result(), RequestLostError)
    while not two.events:
        pass
    life.fails_to_load = False
    two.revive(first)
    assert errors(two) == {"a": RequestLostError}


def test_suspects_are_computed_one_at_a_time(two: FakeFleet) -> None:
    two.revive(kill_with(two, "a"))
    two.kill(rank_of(two, "a"))
    again = [two.begin(name, prompt="a") for name in "bcd"]
    assert held(two) == ["b"]
    assert not again[1].done()
    # None moves while its engine may compute it, although the other one does nothing.
    assert two.submit("innocent") is None
    two.leave_dead(first := rank_of(two, "b"))
    assert errors(two).keys() >= {"a", "b"}
    two.abort("innocent")
    assert not held(two)
    two.revive(first)
    assert held(two) == ["c"]
    # Each of them makes room for the next, however it ends.
    last = rank_of(two, "c")
    two.fleet.abort(Abort(request_id="c"))
    assert [*two.router.placements] == ["d"]
    assert held(two) == ["d"]
    assert rank_of(two, "d") == last, "this engine may still compute the one that was aborted"
    assert finish(two) == {"d"}


def test_suspects_that_waited_are_not_begun_together(two: FakeFleet) -> None:
    rank = kill_with(two, "a")
    for name in "bc":
        two.begin(name, prompt="a")
    assert not held(two)
    two.revive(rank)
    assert held(two) == ["a"]
    assert finish(two) == {"a", "b", "c"}


def test_a_suspect_that_is_refused_makes_room(two: FakeFleet) -> None:
    rank = kill_with(two, "a")
    two.abort("a")
    first, second = two.begin("b", prompt="a"), two.begin("c", prompt="a")
    for life in two.lives:
        life.refusal = OverloadedError("full")
    two.revive(rank)
    assert isinstance(first.result(), OverloadedError)
    two.settle()
    for life in two.lives:
        life.refusal = None
    assert second.result() is None
    assert finish(two) == {"c"}


def test_a_cancelled_request_waits_for_no_engine(two: FakeFleet) -> None:
    assert two.submit("a") is None
    life = two.lives[first := rank_of(two, "a")]
    life.may_load.clear()
    before = life.num_lives
    two.order(first, Die())
    two.cancel("a")
    while life.num_lives == before:
        pass
    assert errors(two) == {"a": RequestAbortedError}
    two.revive(first)


def test_suspects_that_wait_are_bounded(two: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher_module, "MAX_WAITING", 2)
    rank = kill_with(two, "a")
    waiting = two.begin("b", prompt="a")
    assert isinstance(two.submit("c", prompt="a"), OverloadedError)
    assert two.submit("innocent") is None
    assert not waiting.done()
    two.revive(rank)
    assert finish(two) == {"a", "b", "innocent"}


def test_a_silent_engine_does_not_count(two: FakeFleet) -> None:
    two.revive(kill_with(two, "a"))
    two.abort("a")
    silent = two.lives[1]
    silent.is_silent = True
    reply = two.begin("again", prompt="a")
    assert not held(two)
    assert not reply.done()
    # No event comes of an engine that has nothing to do.
    silent.is_silent = False
    two.fleet.readiness()
    assert [*two.router.placements] == ["again"]
    assert held(two) == ["again"]
    assert finish(two) == {"again"}


def test_suspects_wait_for_an_engine_that_may_still_start() -> None:
    fleet = FakeFleet(3)
    try:
        first = kill_with(fleet, "a")
        fleet.abort("a")
        again = fleet.begin("again", prompt="a")
        assert held(fleet) == ["again"]
        fleet.leave_dead(second := rank_of(fleet, "again"))
        assert errors(fleet) == {"again": RequestLostError}
        third = fleet.begin("third", prompt="a")
        fail_to_start(fleet, first)
        assert not third.done(), "the second engine may still start"
        assert again.result() is None
        fail_to_start(fleet, second)
        assert isinstance(third.result(), RequestLostError)
    finally:
        end(fleet)


def fail_to_start(fleet: FakeFleet, rank: int) -> None:
    """Let an engine fail to load, and wait until that is known."""
    life = fleet.lives[rank]
    before = life.num_lives
    life.fails_to_load = True
    life.may_load.set()
    while life.num_lives == before:
        pass
    fleet.settle()
