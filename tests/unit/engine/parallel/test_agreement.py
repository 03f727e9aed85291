"""Engines agree on adapters and weights: one version and one answer, refused or done by all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from mlx_parallm.engine.adapter_commands import CommitAdapter, EnsureAdapter, UnloadAdapter
from mlx_parallm.engine.commands import Abort
from mlx_parallm.engine.engine_commands import CommitUpdate, RelabelWeights
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.engine.policies import AdapterUpload
from mlx_parallm.types.errors import ControlError, OverloadedError, ParallmError
from mlx_parallm.types.events import ErrorEvent, TokenEvent
from tests.fleet_harness import Answer, FakeFleet
from tests.fleet_models import MAX_LOADED
from tests.version_harness import adapter

NAMES = "abcdefgh"[:MAX_LOADED]


def from_folder(name: str) -> AdapterUpload:
    """Return an adapter that can be evicted, because it can be read again."""
    return replace(adapter(name, f"digest {name}", "1"), source=f"/adapters/{name}")


@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    fleet = FakeFleet(3)
    try:
        yield fleet
    finally:
        fleet.stop()


@pytest.fixture
def full(fleet: FakeFleet) -> FakeFleet:
    """Return engines that have as many adapters as they keep."""
    for name in NAMES:
        assert fleet.load_adapter(from_folder(name))
    return fleet


def names_of(fleet: FakeFleet) -> list[str]:
    """Return the adapters of all engines, which must be the same."""
    states = fleet.states()
    assert states == [states[0]] * len(states)
    return [name for name, *_ in states[0][1]]


def use(fleet: FakeFleet, rank: int, *names: str) -> None:
    """Let requests at an engine use adapters."""
    fleet.lives[rank].users.used |= {f"digest {name}" for name in names}


def test_all_engines_evict_the_same_adapter(full: FakeFleet) -> None:
    use(full, 0, "a")
    use(full, 1, "b")
    # An engine alone would evict "b", "a" and "a".
    assert full.load_adapter(from_folder("new"))
    assert names_of(full) == ["a", "b", "d", "new"]
    assert full.call(EnsureAdapter(from_folder("c"), "m")).name == "c"
    assert names_of(full) == ["a", "b", "c", "new"]


def test_engines_evict_what_is_used_least_recently_by_all(full: FakeFleet) -> None:
    for rank, names in enumerate(("ab", "ac", "a")):
        for name in names:
            full.lives[rank].live.policies.weights_of(name)
    assert full.load_adapter(from_folder("new"))
    assert names_of(full) == ["a", "b", "c", "new"]


def test_a_load_is_refused_by_all_if_each_adapter_is_used_somewhere(full: FakeFleet) -> None:
    use(full, 0, "a", "b")
    use(full, 1, "c")
    use(full, 2, "d")
    assert isinstance(full.call(EnsureAdapter(from_folder("new"), "m")), OverloadedError)
    assert not full.load_adapter(from_folder("new"))
    assert names_of(full) == list(NAMES)
    assert not any(life.host.stagings for life in full.lives)


def test_a_request_brings_its_adapter_to_all_engines(full: FakeFleet) -> None:
    use(full, 0, "a")
    assert full.submit("request", adapter="new", upload=from_folder("new")) is None
    assert names_of(full) == ["a", "c", "d", "new"]
    assert sum(len(life.requests) for life in full.lives) == 1


def test_a_request_is_refused_with_its_adapter(full: FakeFleet) -> None:
    for rank, name in ((0, "a"), (0, "b"), (1, "c"), (2, "d")):
        use(full, rank, name)
    refusal = full.submit("request", adapter="new", upload=from_folder("new"))
    assert isinstance(refusal, OverloadedError)
    assert not full.router.placements


@pytest.mark.parametrize("is_notified", [False, True])
def test_a_request_may_end_while_its_adapter_is_loaded(full: FakeFleet, is_notified: bool) -> None:
    with full.fleet._lock:
        reply = full.begin("request", adapter="new", upload=from_folder("new"))
        full.fleet.abort(Abort(request_id="request", is_notified=is_notified))
    assert names_of(full) == ["b", "c", "d", "new"]
    assert reply.done() == is_notified
    assert [event.request_id for event in full.events] == ["request"] * is_notified
    assert not full.router.placements
    assert not any(life.requests for life in full.lives)


def test_an_engine_that_dies_while_they_agree_is_like_the_others_again(full: FakeFleet) -> None:
    use(full, 0, "a", "b")
    use(full, 1, "c")
    use(full, 2, "d")
    # Without the last engine, "d" can be evicted.
    full.kill(2)
    assert full.load_adapter(from_folder("new"))
    assert names_of(full) == ["a", "b", "c", "new"]


CHANGES = {
    CommitUpdate: lambda fleet: fleet.commit(),
    CommitAdapter: lambda fleet: fleet.load_adapter(from_folder("new")),
    UnloadAdapter: lambda fleet: fleet.call(UnloadAdapter("a", "m")),
    RelabelWeights: lambda fleet: fleet.call(RelabelWeights("m", "other")),
}


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("rank", [0, 2])
def test_an_engine_that_fails_where_others_have_changed_is_started_anew(
    full: FakeFleet, kind: type[Any], rank: int
) -> None:
    assert full.prepare(WeightsUpdate(tensors=cast(Any, {"a": "updated"}), version="2"))
    for number in range(6):
        full.submit(str(number))
    begun = set(full.lives[rank].requests)
    full.order(rank, Answer())
    full.submit("late", 3)
    full.lives[rank].fails = kind
    result = CHANGES[kind](full)
    assert not isinstance(result, ParallmError)
    assert full.lives[rank].num_failures == 1
    full.await_life(rank, 2)
    names_of(full)
    # Its requests ended or went elsewhere as those of an engine that died.
    lost = {event.request_id for event in full.events if isinstance(event, ErrorEvent)}
    assert lost == begun
    # Engines that have nothing to do take over what waits at others, so that this is repeated.
    for other in [*range(3)] * 3:
        full.order(other, Answer(is_last=True))
    ends = [event for event in full.events if isinstance(event, TokenEvent) and event.finish_reason]
    assert len(ends) == 6 - len(begun) + 3
    assert not full.router.placements


def test_a_change_that_fails_everywhere_is_refused(full: FakeFleet) -> None:
    for life in full.lives:
        life.fails = RelabelWeights
    assert isinstance(full.call(RelabelWeights("m", "other")), ControlError)
    assert [life.num_lives for life in full.lives] == [1, 1, 1]
    names_of(full)


def test_an_engine_that_cannot_catch_up_answers_nothing(fleet: FakeFleet) -> None:
    assert fleet.prepare(WeightsUpdate(tensors=cast(Any, {"a": "updated"}), version="2"))
    fleet.commit()
    fleet.lives[1].fails = CommitUpdate
    fleet.kill(1)
    fleet.await_life(1, 3)
    assert fleet.lives[1].num_failures == 1
    assert names_of(fleet) == []
    assert fleet.lives[1].weights.tensors["a"] == "updated"


def test_an_update_that_one_engine_refuses_leaves_nothing(fleet: FakeFleet) -> None:
    fleet.lives[1].weights.refuses = True
    assert not fleet.prepare(WeightsUpdate(tensors=cast(Any, {"a": "refused"})))
    assert [life.weights.prepared for life in fleet.lives] == [None] * 3
    assert [life.num_lives for life in fleet.lives] == [1, 1, 1]
    assert names_of(fleet) == []
