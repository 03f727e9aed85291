"""Beside streams every class of work has its share of turns, whatever the others do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count, pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_parallm.engine.turns import GAPS, MAX_SHORT_S, SHORT_S, TurnClass, Turns, TurnTaker
from mlx_parallm.types.work import Event

CLASSES = (TurnClass.FORWARD, TurnClass.BATCHES, TurnClass.TRAINING)
#: SHARES: turns that a class has at least of ``OF_TURNS`` that it wants.
SHARES = {TurnClass.FORWARD: 4, TurnClass.BATCHES: 2, TurnClass.TRAINING: 1}
OF_TURNS = 8


class Taker(TurnTaker):
    """Work that arrives by hand and takes a turn each."""

    def __init__(self, turn_class: TurnClass, name: int = 0) -> None:
        self.turn_class = turn_class
        self.name = name
        self.arrivals: list[int] = []
        self.waits_s = 0.0
        self.known_s = math.inf
        self.turns: list[Taker] = []

    @property
    def predicted_s(self) -> float:
        return self.known_s

    @property
    def waiting_since_s(self) -> float:
        return self.arrivals[0]

    def ready_in_s(self) -> float:
        return self.waits_s

    def has_work(self) -> bool:
        return bool(self.arrivals)

    def step(self, within_s: float | None = None) -> Sequence[Event]:
        self.turns.append(self)
        self.arrivals.pop(0)
        return ()


class Stream(Taker):
    """A model that always decodes."""

    def __init__(self) -> None:
        super().__init__(TurnClass.STREAMS)
        self.num_steps = 0
        self.num_settled = 0
        self.within_s: float | None = None

    def settle(self) -> Sequence[Event]:
        self.num_settled += 1
        return ()

    def has_work(self) -> bool:
        return True

    def step(self, within_s: float | None = None) -> Sequence[Event]:
        self.num_steps += 1
        self.within_s = within_s
        return ()


class Round(NamedTuple):
    """The classes that wanted the turn of a round, and the one that had it."""

    wanted: frozenset[TurnClass]
    taken: TurnClass | None


def run(rounds: Sequence[frozenset[TurnClass]]) -> list[Round]:
    """Run rounds beside a stream in which these classes have work."""
    turns, stream = Turns(lambda events: None), Stream()
    log: list[Taker] = []
    takers = [Taker(turn_class) for turn_class in CLASSES]
    seen: list[Round] = []
    for number, wanted in enumerate(rounds):
        for taker in takers:
            taker.turns = log
            taker.arrivals = [number] if taker.turn_class in wanted else []
        before = len(log)
        turns.take([stream, *takers])
        assert stream.num_steps == number + 1, "a stream steps in every round"
        assert len(log) - before == (1 if wanted else 0), "a turn that somebody wants is taken once"
        seen.append(Round(wanted, log[-1].turn_class if wanted else None))
    return seen


def assert_fair(seen: Sequence[Round]) -> None:
    """Assert that each class has its share of every eight turns in a row that it wants."""
    turns = [each for each in seen if each.taken is not None]
    for turn_class, share in SHARES.items():
        for first in range(len(turns) - OF_TURNS + 1):
            window = turns[first : first + OF_TURNS]
            if all(turn_class in each.wanted for each in window):
                taken = sum(each.taken is turn_class for each in window)
                assert taken >= share, (turn_class, window)


WANTED = st.frozensets(st.sampled_from(CLASSES))


@given(
    st.lists(WANTED, max_size=20),
    st.lists(st.tuples(WANTED, st.sampled_from([None, *CLASSES])), max_size=40),
)
def test_each_class_has_its_share(
    before: list[frozenset[TurnClass]],
    after: list[tuple[frozenset[TurnClass], TurnClass | None]],
) -> None:
    # A class that works without a break is the one that could be starved.
    steady = [wanted | ({always} if always else set()) for wanted, always in after]
    assert_fair(run([*before, *steady]))


@given(st.lists(WANTED, max_size=12), st.lists(WANTED, min_size=16, max_size=16), st.data())
def test_a_class_that_always_has_work_is_never_starved(
    before: list[frozenset[TurnClass]], others: list[frozenset[TurnClass]], data: st.DataObject
) -> None:
    turn_class = data.draw(st.sampled_from(CLASSES))
    assert_fair(run([*before, *(wanted | {turn_class} for wanted in others)]))


def test_of_a_thousand_turns_that_all_want() -> None:
    taken = [each.taken for each in run([frozenset(CLASSES)] * 1000)]
    shares = [taken.count(turn_class) for turn_class in CLASSES]
    assert shares == [571, 286, 143]
    gaps = [place for place, each in enumerate(taken) if each is TurnClass.FORWARD]
    assert max(after - before for before, after in pairwise(gaps)) <= 3


@pytest.mark.parametrize("alone", CLASSES)
def test_a_turn_that_others_do_not_want_is_nobodys_debt(alone: TurnClass) -> None:
    seen = run([frozenset({alone})] * 20 + [frozenset(CLASSES)] * 16)
    assert [each.taken for each in seen[:20]] == [alone] * 20
    assert_fair(seen)


@given(st.lists(st.sampled_from(range(6)), min_size=1, max_size=30))
def test_the_oldest_of_a_class_goes_first(owners: list[int]) -> None:
    log: list[Taker] = []
    takers = [Taker(CLASSES[number % 3], number) for number in range(6)]
    arrivals = count()
    for taker in takers:
        taker.turns = log
    for owner in owners:
        takers[owner].arrivals.append(next(arrivals))
    turns, others = Turns(lambda events: None), list[tuple[TurnClass, int]]()
    while any(taker.arrivals for taker in takers):
        waiting = {taker.name: list(taker.arrivals) for taker in takers}
        turns.take([Stream(), *takers])
        own = log[-1]
        oldest = min(
            waiting[taker.name][0]
            for taker in takers
            if taker.turn_class is own.turn_class and waiting[taker.name]
        )
        others.append((own.turn_class, oldest))
        assert waiting[own.name][0] == oldest
    for turn_class in CLASSES:
        ages = [age for each, age in others if each is turn_class]
        assert ages == sorted(ages)


def test_what_still_waits_for_company_takes_no_turn() -> None:
    waiting, training = Taker(TurnClass.BATCHES), Taker(TurnClass.TRAINING)
    waiting.waits_s = 0.5
    for taker in (waiting, training):
        taker.arrivals, taker.turns = [0, 0], []
    turns = Turns(lambda events: None)
    for _ in range(2):
        turns.take([Stream(), waiting, training])
    assert len(waiting.arrivals) == 2
    assert not training.arrivals


def test_without_streams_all_step() -> None:
    takers: list[Any] = [Taker(turn_class) for turn_class in CLASSES]
    for taker in takers:
        taker.arrivals = [0, 1]
    Turns(lambda events: None).take(takers)
    assert [len(taker.turns) for taker in takers] == [1, 1, 1]


def test_every_class_but_streams_has_a_gap() -> None:
    assert GAPS.keys() | {TurnClass.STREAMS} == set(TurnClass)


def short_nets(*seconds: float) -> list[Taker]:
    """Return nets whose next forwards take these seconds, oldest first."""
    nets = [Taker(TurnClass.FORWARD, number) for number, _ in enumerate(seconds)]
    log: list[Taker] = []
    for age, (net, each_s) in enumerate(zip(nets, seconds, strict=True)):
        net.known_s, net.arrivals, net.turns = each_s, [age], log
    return nets


@given(st.lists(WANTED, max_size=40), st.data())
def test_short_forwards_take_no_turn(
    rounds: list[frozenset[TurnClass]], data: st.DataObject
) -> None:
    expected = [each.taken for each in run(rounds)]
    turns, stream = Turns(lambda events: None), Stream()
    takers = [Taker(turn_class) for turn_class in CLASSES]
    (net,) = short_nets(SHORT_S)
    for number, (wanted, taken) in enumerate(zip(rounds, expected, strict=True)):
        acts = data.draw(st.booleans())
        net.arrivals, net.turns = [number] if acts else [], []
        log: list[Taker] = []
        for taker in takers:
            taker.turns, taker.arrivals = log, [number] if taker.turn_class in wanted else []
        turns.take([stream, *takers, net])
        assert [each.turn_class for each in log] == ([] if taken is None else [taken])
        assert len(net.turns) == acts, "a short forward waits for no other"


def test_short_forwards_run_before_streams_and_settle_nobody() -> None:
    order: list[str] = []

    class Noted(Stream):
        def step(self, within_s: float | None = None) -> Sequence[Event]:
            order.append("stream")
            return super().step(within_s)

    class Net(Taker):
        @property
        def settles_others(self) -> bool:
            return True

        def step(self, within_s: float | None = None) -> Sequence[Event]:
            order.append(f"net within {within_s}")
            return super().step(within_s)

    stream, net = Noted(), Net(TurnClass.FORWARD)
    net.known_s, net.arrivals = SHORT_S, [0, 0]
    turns = Turns(lambda events: None)
    turns.take([stream, net])
    assert order == [f"net within {SHORT_S}", "stream"]
    assert stream.num_settled == 0
    net.known_s = 2 * SHORT_S
    turns.take([stream, net])
    assert order[2:] == ["stream", f"net within {0.0}"], "a longer one waits for its turn"
    assert stream.num_settled == 1


@pytest.mark.parametrize("each_s", [SHORT_S, 0.7 * SHORT_S, 0.2 * SHORT_S])
def test_short_forwards_of_a_round_are_bounded(each_s: float) -> None:
    nets = short_nets(*[each_s] * 20)
    log = nets[0].turns
    turns = Turns(lambda events: None)
    num_short = min(20, int(MAX_SHORT_S / each_s))
    turns.take([Stream(), *nets])
    # One of those that are left has the round's turn.
    assert [net.name for net in log] == list(range(min(20, num_short + 1)))
    while any(net.arrivals for net in nets):
        before = len(log)
        turns.take([Stream(), *nets])
        assert len(log) - before <= num_short + 1
    assert [net.name for net in log] == list(range(20)), "the oldest go first"


@pytest.mark.parametrize("turn_class", [TurnClass.BATCHES, TurnClass.TRAINING])
def test_short_steps_of_other_classes_take_turns(turn_class: TurnClass) -> None:
    (net,), (other,) = short_nets(math.inf), short_nets(SHORT_S / 10)
    other.turn_class, other.turns = turn_class, net.turns
    turns = Turns(lambda events: None)
    turns.take([Stream(), net, other])
    assert len(net.turns) == 1


def test_a_short_forward_that_still_waits_does_not_run() -> None:
    (net,) = short_nets(SHORT_S)
    net.waits_s = 0.5
    assert Turns(lambda events: None).take([Stream(), net]) == 0.0
    assert net.arrivals


@pytest.mark.parametrize("known_s", [SHORT_S, math.inf])
def test_without_streams_forwards_step_once_a_round(known_s: float) -> None:
    nets = short_nets(*[known_s] * 9)
    Turns(lambda events: None).take(nets)
    assert [net.name for net in nets[0].turns] == list(range(9))


def test_streams_know_whether_others_wait_for_their_step() -> None:
    turns, streams = Turns(lambda events: None), [Stream(), Stream()]
    turns.take(streams[:1])
    assert streams[0].within_s is None
    turns.take(streams)
    assert all(stream.within_s is not None for stream in streams)
