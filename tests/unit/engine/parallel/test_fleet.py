"""Engines in parallel stay alike, whatever dies; requests end, and none is answered twice."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from mlx_parallm.engine.adapter_commands import EnsureAdapter, ListVersions, UnloadAdapter
from mlx_parallm.engine.engine_commands import CommitUpdate, RelabelWeights
from mlx_parallm.engine.live_weights import WeightsUpdate
from mlx_parallm.engine.status import Readiness
from mlx_parallm.types.errors import ConflictError, EngineDeadError, ParallmError, RequestLostError
from mlx_parallm.types.events import ErrorEvent, TokenEvent
from mlx_parallm.types.nets import NetRequest, SequenceUse
from mlx_parallm.types.work import RequestWork
from tests.fleet_harness import PATIENCE_S, Answer, Death, Die, FakeFleet
from tests.fleet_models import MAX_LOADED
from tests.version_harness import BAD_DIGEST, adapter

NUM_HISTORIES = 200


@contextmanager
def fleet_of(num_engines: int, *, outlives_engines: bool = False) -> Iterator[FakeFleet]:
    fleet = FakeFleet(num_engines, outlives_engines=outlives_engines)
    try:
        yield fleet
    finally:
        fleet.stop()


def tensors(**values: str) -> WeightsUpdate:
    return WeightsUpdate(tensors=cast(Any, values))


class History:
    """Random changes and deaths, and the state that every engine must have."""

    def __init__(self, fleet: FakeFleet, seed: int) -> None:
        self._fleet = fleet
        self._chance = random.Random(seed)
        self.weights = {"a": "start", "b": "start"}
        self.label = "default"
        self.adapters: dict[str, tuple[str, str]] = {}
        self._num_updates = 0

    def step(self) -> None:
        """Make one change."""
        self._chance.choice(
            [
                self._update,
                self._update,
                self._refused_update,
                self._relabel,
                self._load_adapter,
                self._load_adapter,
                self._unload_adapter,
                self._fail_update,
                self._evict,
                self._kill,
            ]
        )()

    def check(self) -> None:
        """Compare every engine with what it must be."""
        adapters = sorted((name, *adapter) for name, adapter in self.adapters.items())
        assert self._fleet.states() == [(self.weights, adapters, self.label, None)] * len(
            self._fleet.lives
        )

    def _rank(self) -> int:
        return self._chance.randrange(len(self._fleet.lives))

    def _kill(self) -> None:
        self._fleet.kill(self._rank())

    def _update(self) -> None:
        value = f"update {self._chance.random()}"
        if self._chance.random() < 0.3:
            update, weights = WeightsUpdate(folder=Path(value)), {"a": value, "b": value}
        else:
            name = self._chance.choice("ab")
            update, weights = tensors(**{name: value}), self.weights | {name: value}
        label = self._chance.choice([None, value])
        assert self._fleet.prepare(
            WeightsUpdate(folder=update.folder, tensors=update.tensors, version=label)
        )
        if self._chance.random() < 0.3:
            self._kill()
        self._fleet.commit()
        self._num_updates += 1
        self.weights = weights
        self.label = label or self._fleet.lives[0].state[2]

    def _refused_update(self) -> None:
        self._fleet.lives[self._rank()].weights.refuses = True
        assert not self._fleet.prepare(tensors(a="refused"))

    def _relabel(self) -> None:
        self.label = f"label {self._chance.random()}"
        assert not isinstance(self._fleet.call(RelabelWeights("m", self.label)), ParallmError)

    def _load_adapter(self) -> None:
        name, digest = self._chance.choice("xyz"), f"digest {self._chance.random()}"
        if self._chance.random() < 0.2:
            assert not self._fleet.load_adapter(adapter(name, BAD_DIGEST, None))
            return
        before = set(self.adapters)
        if not self._fleet.load_adapter(adapter(name, digest, digest)):
            # Requests use all that can be evicted.
            assert len(self.adapters) == MAX_LOADED
            assert name not in before
            return
        self.adapters[name] = digest, digest
        if len(self.adapters) > MAX_LOADED:
            loaded = {name for name, *_ in self._fleet.lives[0].state[1]}
            assert len(before - loaded) == 1
            self.adapters = {name: self.adapters[name] for name in loaded}

    def _fail_update(self) -> None:
        """Let the commit fail at one engine, which is started anew with what the others have."""
        rank = self._rank()
        life = self._fleet.lives[rank]
        number = life.num_lives + 1
        value = f"update {self._chance.random()}"
        assert self._fleet.prepare(WeightsUpdate(tensors=cast(Any, {"a": value}), version=value))
        life.fails = CommitUpdate
        self._fleet.commit()
        self._num_updates += 1
        self.weights, self.label = self.weights | {"a": value}, value
        self._fleet.await_life(rank, number)

    def _evict(self) -> None:
        """Load adapters that can come back until one is evicted, while engines use others."""
        names = [f"folder {number}" for number in range(MAX_LOADED)]
        for life in self._fleet.lives:
            life.users.used = {f"digest {self._chance.choice(names)}"}
        for name in names:
            upload = replace(adapter(name, f"digest {name}", "1"), source=f"/{name}")
            before = self._fleet.lives[0].state[1]
            result = self._fleet.call(EnsureAdapter(upload, "m"))
            if isinstance(result, ParallmError):
                assert self._fleet.lives[0].state[1] == before
        self._fleet.settle()
        self.adapters = {
            name: (digest, version) for name, digest, version in self._fleet.lives[0].state[1]
        }

    def _unload_adapter(self) -> None:
        if self.adapters:
            name = self._chance.choice(sorted(self.adapters))
            assert not isinstance(self._fleet.call(UnloadAdapter(name, "m")), ParallmError)
            del self.adapters[name]


@pytest.mark.parametrize("part", range(10))
def test_engines_stay_alike_through_changes_and_deaths(part: int) -> None:
    for seed in range(part, NUM_HISTORIES, 10):
        with fleet_of(2 + seed % 3) as fleet:
            history = History(fleet, seed)
            for _ in range(12):
                history.step()
                history.check()


def test_requests_without_a_token_move_from_a_dead_engine_and_the_others_end() -> None:
    with fleet_of(2) as fleet:
        for number in range(6):
            assert fleet.submit(str(number)) is None
        begun = set(fleet.lives[0].requests)
        fleet.order(0, Answer())
        assert {event.request_id for event in fleet.events} == begun
        late = {str(number) for number in range(6, 10)}
        for name in sorted(late):
            fleet.submit(name)
        moved = set(fleet.lives[0].requests) - begun
        fleet.settle()
        moved = set(fleet.lives[0].requests) - begun
        assert moved
        fleet.kill(0)
        lost = {event.request_id for event in fleet.events if isinstance(event, ErrorEvent)}
        assert lost == begun
        fleet.order(1, Answer(is_last=True))
        fleet.order(0, Answer(is_last=True))
        answered = [
            event.request_id
            for event in fleet.events
            if isinstance(event, TokenEvent) and event.finish_reason is not None
        ]
        assert sorted(answered) == sorted({str(number) for number in range(10)} - begun)
        assert not fleet.router.placements
        assert not fleet.dispatcher._open


def test_engines_of_other_machines_may_all_be_lost_for_a_while() -> None:
    with fleet_of(2, outlives_engines=True) as fleet:
        assert fleet.prepare(tensors(a="new"))
        fleet.commit()
        before = fleet.states()
        for number in range(4):
            assert fleet.submit(str(number)) is None
        fleet.leave_dead(0)
        fleet.leave_dead(1)
        assert fleet.lives[0].num_lives == 2
        lost = [event for event in fleet.events if isinstance(event, ErrorEvent)]
        assert sorted(event.request_id for event in lost) == ["0", "1", "2", "3"]
        assert {type(event.error) for event in lost} == {RequestLostError}
        assert isinstance(fleet.submit("meanwhile"), EngineDeadError)
        assert isinstance(fleet.call(ListVersions()), EngineDeadError)
        assert not fleet.ended.is_set()
        assert not fleet.router.placements
        fleet.revive(1)
        assert fleet.submit("later") is None
        fleet.revive(0)
        assert fleet.states() == before


def test_engines_of_this_machine_end_with_the_last_one() -> None:
    with fleet_of(2) as fleet:
        fleet.leave_dead(0)
        fleet.order(1, Die())
        assert fleet.ended.wait(PATIENCE_S)
        fleet.lives[0].may_load.set()


def sequence(request_id: str, name: str, *, is_start: bool = False) -> NetRequest:
    use = SequenceUse(owner="client", sequence_id=name, is_start=is_start)
    return NetRequest(request_id=request_id, model="m", inputs={}, num_rows=1, sequence=use)


def test_sequences_of_a_dead_engine_are_refused_by_name_until_they_start_again() -> None:
    with fleet_of(2) as fleet:
        for name in "abcd":
            assert fleet.send(sequence(f"{name} begins", name, is_start=True)).result() is None
        lost = sorted(name[0] for name in fleet.lives[0].requests)
        kept = sorted(name[0] for name in fleet.lives[1].requests)
        assert (len(lost), len(kept)) == (2, 2)
        for rank in range(2):
            fleet.order(rank, Answer(is_last=True))
        assert fleet.send(sequence("in flight", lost[0])).result() is None
        fleet.events.clear()
        fleet.kill(0)
        (event,) = fleet.events
        assert isinstance(event, ErrorEvent)
        assert (event.request_id, type(event.error)) == ("in flight", ConflictError)
        for name in lost:
            refusal = fleet.send(sequence(f"{name} goes on", name)).result()
            assert isinstance(refusal, ConflictError)
            assert f"The engine that kept the sequence {name!r} stopped" in str(refusal)
            assert refusal.param == "sequence_id"
        for name in kept:
            assert fleet.send(sequence(f"{name} goes on", name)).result() is None
        for name in lost:
            assert fleet.send(sequence(f"{name} again", name, is_start=True)).result() is None
            fleet.order(0, Answer(is_last=True))
            fleet.order(1, Answer(is_last=True))
            assert fleet.send(sequence(f"{name} goes on", name)).result() is None


def test_the_death_of_the_last_engine_is_that_of_the_fleet() -> None:
    with fleet_of(1) as fleet:
        fleet.order(0, Die())
        assert fleet.ended.wait()
        with pytest.raises(Death):
            fleet.fleet.check()


def test_an_engine_that_catches_up_is_not_ready() -> None:
    with fleet_of(2) as fleet:
        assert fleet.fleet.readiness() == [Readiness.READY] * 2
        assert fleet.load_adapter(adapter("a", "digest", "1"))
        life = fleet.lives[1]
        life.goes_on.clear()
        fleet.order(1, Die())
        while life.num_lives < 2 or not fleet.fleet._members[1].is_serving:
            pass
        assert fleet.fleet.readiness() == [Readiness.READY, Readiness.CATCHING_UP]
        life.goes_on.set()
        fleet.settle()
        assert fleet.fleet.readiness() == [Readiness.READY] * 2
        assert life.state == fleet.lives[0].state


def test_an_engine_that_is_silent_gets_requests_only_if_all_are() -> None:
    with fleet_of(3) as fleet:

        def ranks() -> set[int]:
            return {placed.rank for placed in fleet.router.placements.values()}

        fleet.lives[1].is_silent = True
        for number in range(6):
            assert fleet.submit(str(number), num_samples=1 + number % 3) is None
        assert ranks() == {0, 2}
        # The requests of a dead engine have given nothing: another one begins them anew.
        fleet.kill(0)
        assert 1 not in ranks()
        for number in range(6):
            fleet.abort(str(number))
        for life in fleet.lives:
            life.is_silent = True
        for number in range(6):
            assert fleet.submit(f"later {number}") is None
        assert ranks() == {0, 1, 2}


def test_a_client_that_chooses_a_silent_engine_gets_another() -> None:
    with fleet_of(2) as fleet:
        work = RequestWork(num_tokens=4, num_samples=1, rank=1)
        fleet.router.loads[1].is_silent = True
        assert [share.rank for share in fleet.router.divide(work)] == [0]
        fleet.router.loads[1].is_silent = False
        assert [share.rank for share in fleet.router.divide(work)] == [1]
