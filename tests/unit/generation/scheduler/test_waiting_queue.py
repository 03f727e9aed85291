"""Waiting sequences run by priority, clients in turn, short prompts first; none starves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlx_parallm.generation.scheduler.sequence import RequestGroup, Sequence
from mlx_parallm.generation.scheduler.waiting import (
    AGING_PERIOD,
    LONG_PROMPT,
    PATIENCE,
    WaitingQueue,
)
from mlx_parallm.types.model_input import source_of
from mlx_parallm.types.request import GenerateRequest, PolicyWeights


class Arrivals:
    """Makes sequences that arrive one after the other."""

    def __init__(self) -> None:
        self._numbers = count()
        # All are of one adapter: those of different ones pass each other.
        self._weights = PolicyWeights()

    def next(
        self, client: str = "", priority: int = 0, num_tokens: int = 2, num_source: int = 0
    ) -> Sequence:
        number = next(self._numbers)
        request = GenerateRequest(
            request_id=f"{client}{number}",
            model="m",
            prompt_ids=(1,) * num_tokens,
            priority=priority,
            client=client,
            inputs=(source_of([1] * num_source),) if num_source else (),
        )
        group = RequestGroup(request, frozenset(), number, self._weights)
        return Sequence(number, group, 0, 0, [1])


def anybody(sequence: Sequence) -> bool:
    return True


def queue_of(*names: str) -> tuple[WaitingQueue, dict[str, Sequence]]:
    """Return a queue of these; ``a1`` is a sequence of client a, ``a1!`` one of priority -1."""
    queue, arrivals = WaitingQueue(), Arrivals()
    sequences = {name: arrivals.next(name[0], -name.count("!")) for name in names}
    for sequence in sequences.values():
        queue.append(sequence)
    return queue, sequences


def admitted(queue: WaitingQueue, sequences: dict[str, Sequence]) -> Iterator[str]:
    """Names in the order in which everybody is admitted."""
    names = {id(sequence): name for name, sequence in sequences.items()}
    while (sequence := queue.peek(anybody)) is not None:
        queue.admit(sequence)
        yield names[id(sequence)]
    assert len(queue) == 0


@pytest.mark.parametrize(
    ("arrived", "order"),
    [
        ("a1 a2 a3", "a1 a2 a3"),
        ("a1 a2 a3 b1 b2 c1", "a1 b1 c1 a2 b2 a3"),
        ("b1 a1 a2 b2 a3", "b1 a1 b2 a2 a3"),
        ("a1 a2 b1! a3! b2", "b1! a3! a1 b2 a2"),
        ("a1! a2! b1 b2 a3", "a1! a2! b1 a3 b2"),
        ("a1 b1! c1!!", "c1!! b1! a1"),
    ],
)
def test_better_priorities_first_then_clients_in_turn(arrived: str, order: str) -> None:
    queue, sequences = queue_of(*arrived.split())
    assert list(admitted(queue, sequences)) == order.split()


def test_who_arrives_later_joins_the_round_behind_those_who_wait() -> None:
    queue, sequences = queue_of("a1", "b1", "b2")
    queue.admit(sequences["a1"])
    arrivals = Arrivals()
    sequences |= {"a2": arrivals.next("a"), "c1": arrivals.next("c")}
    queue.append(sequences["a2"])
    queue.append(sequences["c1"])
    assert list(admitted(queue, sequences)) == ["b1", "a2", "c1", "b2"]


def queue_of_prompts(*lengths: int) -> tuple[WaitingQueue, list[Sequence]]:
    """Return a queue of one client's prompts with so many tokens, which came in this order."""
    queue, arrivals = WaitingQueue(), Arrivals()
    sequences = [arrivals.next(num_tokens=length) for length in lengths]
    for sequence in sequences:
        queue.append(sequence)
    return queue, sequences


def lengths_in_order(queue: WaitingQueue) -> Iterator[int]:
    while (sequence := queue.peek(anybody)) is not None:
        queue.admit(sequence)
        yield len(sequence.request.prompt_ids)


def test_of_prompts_that_wait_together_the_shortest_goes_first() -> None:
    queue, _ = queue_of_prompts(30, 10, 500, 10, 20)
    assert list(lengths_in_order(queue)) == [10, 10, 20, 30, 500]


def test_the_longest_waiting_prompt_is_admitted_behind_fifteen_shorter_ones() -> None:
    queue, _ = queue_of_prompts(500, *[10] * 40)
    assert list(lengths_in_order(queue)).index(500) == AGING_PERIOD - 1


def test_a_source_counts_as_a_prompt_does() -> None:
    queue, arrivals = WaitingQueue(), Arrivals()
    long, short, none = (arrivals.next(num_source=count) for count in (40, 30, 0))
    for sequence in (long, short, none):
        queue.append(sequence)
    assert list(taken(queue)) == [none, short, long]


def test_equal_prompts_and_long_ones_keep_the_order_of_their_arrival() -> None:
    queue, sequences = queue_of_prompts(LONG_PROMPT + 7, LONG_PROMPT, LONG_PROMPT + 1, 5, 5)
    order = [sequences[place] for place in (3, 4, 0, 1, 2)]
    assert [each.seq_id for each in order] == [each.seq_id for each in taken(queue)]


def taken(queue: WaitingQueue) -> Iterator[Sequence]:
    while (sequence := queue.peek(anybody)) is not None:
        queue.admit(sequence)
        yield sequence


def test_a_short_prompt_passes_no_long_one_that_has_waited_long() -> None:
    queue, (long, *_) = queue_of_prompts(100, *[80] * PATIENCE)
    arrivals = Arrivals()
    for _ in range(PATIENCE):
        sequence = queue.peek(anybody)
        assert sequence is not None
        assert sequence is not long
        queue.admit(sequence)
    # 80 of its 100 tokens were admitted so many times since it came.
    queue.append(arrivals.next(num_tokens=25))
    queue.append(arrivals.next(num_tokens=15))
    assert list(lengths_in_order(queue)) == [15, 100, 25]


def test_who_was_running_goes_before_shorter_prompts() -> None:
    queue, (_, long) = queue_of_prompts(1, 50)
    queue.admit(long)
    queue.push_front(long)
    assert list(lengths_in_order(queue)) == [50, 1]


def test_prompts_are_compared_with_those_of_their_client_alone() -> None:
    queue, arrivals = WaitingQueue(), Arrivals()
    for client, length in (("a", 90), ("a", 80), ("b", 10), ("b", 20)):
        queue.append(arrivals.next(client, num_tokens=length))
    assert list(lengths_in_order(queue)) == [80, 10, 90, 20]


LENGTHS = st.one_of(st.integers(1, 20), st.integers(LONG_PROMPT - 2, 2 * LONG_PROMPT))


@given(arrived=st.lists(st.lists(LENGTHS, max_size=4), min_size=1, max_size=40))
@settings(deadline=None)
def test_a_later_prompt_passes_an_earlier_one_only_by_fewer_tokens(
    arrived: list[list[int]],
) -> None:
    # Prompts come before every admission; the turns of the longest waiting are left out.
    queue, arrivals = WaitingQueue(), Arrivals()
    # Tokens that were admitted when a sequence came.
    before: dict[Sequence, int] = {}
    num_admitted = 0
    for number, lengths in enumerate(arrived):
        for length in lengths:
            sequence = arrivals.next(num_tokens=length)
            before[sequence] = num_admitted
            queue.append(sequence)
        chosen = queue.peek(anybody)
        if chosen is None:
            continue
        for other in queue:
            if other.seq_id < chosen.seq_id and number % AGING_PERIOD != AGING_PERIOD - 1:
                saved = counted(other) - counted(chosen)
                assert before[chosen] - before[other] < PATIENCE * saved
        queue.admit(chosen)
        num_admitted += counted(chosen)


def counted(sequence: Sequence) -> int:
    return min(len(sequence.request.prompt_ids), LONG_PROMPT)


@given(short=st.integers(LONG_PROMPT // 8, LONG_PROMPT - 1), per_turn=st.integers(1, 2))
@settings(deadline=None, max_examples=20)
def test_no_long_prompt_starves_behind_endless_short_ones(short: int, per_turn: int) -> None:
    queue, (long,) = queue_of_prompts(3 * LONG_PROMPT)
    arrivals = Arrivals()
    # Those that come while so many tokens are admitted go first, and none that come later.
    most = per_turn * (PATIENCE * LONG_PROMPT // short + 2)
    for number in range(most + most // AGING_PERIOD + 2):
        if number % AGING_PERIOD == AGING_PERIOD - 1:
            # It needs no turn of the longest waiting: another sequence takes those.
            other = arrivals.next("another client")
            queue.append(other)
            queue.admit(other)
            continue
        for _ in range(per_turn):
            queue.append(arrivals.next(num_tokens=short))
        sequence = queue.peek(anybody)
        assert sequence is not None
        queue.admit(sequence)
        if sequence is long:
            return
    pytest.fail("the long prompt waits for ever")


def test_a_look_changes_nothing() -> None:
    queue, sequences = queue_of("a1", "b1", "a2")
    for _ in range(2 * AGING_PERIOD):
        assert queue.peek(anybody) is sequences["a1"]
        assert queue.peek(lambda sequence: sequence.request.client == "b") is sequences["b1"]
    assert len(queue) == 3
    assert list(admitted(queue, sequences)) == ["a1", "b1", "a2"]


def test_clients_that_may_not_run_are_passed_over_and_keep_their_turn() -> None:
    queue, sequences = queue_of("a1!", "a2", "b1", "b2")
    only_b = [queue.peek(lambda sequence: sequence.request.client == "b") for _ in range(2)]
    assert only_b == [sequences["b1"]] * 2
    queue.admit(sequences["b1"])
    assert queue.peek(lambda sequence: False) is None
    assert list(admitted(queue, sequences)) == ["a1!", "a2", "b2"]


def test_nobody_waits_in_an_empty_queue() -> None:
    queue = WaitingQueue()
    assert (len(queue), list(queue), queue.peek(anybody)) == (0, [], None)
    assert not queue.remove(Arrivals().next("a"))


def test_who_was_running_goes_before_others_of_its_priority_but_not_before_better_ones() -> None:
    queue, sequences = queue_of("b1", "a1", "a2", "c1!")
    queue.admit(sequences["a1"])
    queue.push_front(sequences["a1"])
    assert list(admitted(queue, sequences)) == ["c1!", "a1", "b1", "a2"]


def test_those_put_back_worst_first_run_again_best_first() -> None:
    queue, sequences = queue_of("b1", "a1", "a2", "a3", "b2")
    for name in ("b1", "a1", "a2"):
        queue.admit(sequences[name])
    for name in ("a2", "a1", "b1"):
        queue.push_front(sequences[name])
    assert list(admitted(queue, sequences)) == ["b1", "a1", "b2", "a2", "a3"]


@pytest.mark.parametrize("gone", ["a1", "a2", "a3", "b1", "c1!"])
def test_who_is_removed_is_gone_and_the_others_stay_in_order(gone: str) -> None:
    queue, sequences = queue_of("a1", "a2", "b1", "a3", "c1!")
    assert queue.remove(sequences[gone])
    assert not queue.remove(sequences[gone])
    assert len(queue) == 4
    assert sequences[gone] not in list(queue)
    left = [name for name in ("c1!", "a1", "b1", "a2", "a3") if name != gone]
    if gone == "a1":
        left = ["c1!", "a2", "b1", "a3"]
    assert list(admitted(queue, sequences)) == left


def test_who_is_admitted_is_taken_out_even_from_the_middle() -> None:
    queue, sequences = queue_of("a1", "a2", "b1")
    queue.admit(sequences["a2"])
    assert set(queue) == {sequences["a1"], sequences["b1"]}
    assert list(admitted(queue, sequences)) == ["b1", "a1"]


def test_every_so_often_the_longest_waiting_runs_whatever_its_priority() -> None:
    queue, arrivals = WaitingQueue(), Arrivals()
    old = [arrivals.next("a", priority=5), arrivals.next("b", priority=9)]
    for sequence in old:
        queue.append(sequence)
    places: dict[int, int] = {}
    for number in range(2 * AGING_PERIOD):
        queue.append(arrivals.next("c", priority=-1))
        sequence = queue.peek(anybody)
        assert sequence is not None
        queue.admit(sequence)
        if sequence in old:
            places[number] = old.index(sequence)
    assert places == {AGING_PERIOD - 1: 0, 2 * AGING_PERIOD - 1: 1}


def test_the_longest_waiting_keeps_its_place_until_it_can_start() -> None:
    queue, arrivals = WaitingQueue(), Arrivals()
    old = arrivals.next("a", priority=5)
    queue.append(old)
    for _ in range(AGING_PERIOD - 1):
        better = arrivals.next("b")
        queue.append(better)
        queue.admit(better)
    for _ in range(3):
        queue.append(arrivals.next("b"))
        assert queue.peek(anybody) is old
    assert queue.peek(lambda sequence: sequence.request.client == "b") is not old
    queue.admit(old)
    assert [sequence.request.client for sequence in queue] == ["b"] * 3


@given(
    patient=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), min_size=1, max_size=6),
    newcomers=st.lists(
        st.tuples(st.sampled_from("abcdefg"), st.integers(-2, 3)), min_size=1, max_size=8
    ),
    per_turn=st.integers(1, 3),
)
@settings(deadline=None)
def test_nobody_starves_behind_endless_arrivals(
    patient: list[tuple[str, int]], newcomers: list[tuple[str, int]], per_turn: int
) -> None:
    queue, arrivals = WaitingQueue(), Arrivals()
    waiting = [arrivals.next(client, priority) for client, priority in patient]
    for sequence in waiting:
        queue.append(sequence)
    late = (newcomers[i % len(newcomers)] for i in count())
    for _ in range(AGING_PERIOD * len(waiting)):
        for _ in range(per_turn):
            queue.append(arrivals.next(*next(late)))
        sequence = queue.peek(anybody)
        assert sequence is not None
        queue.admit(sequence)
    assert not set(waiting) & set(queue)


@given(counts=st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 8), min_size=2))
def test_no_client_gets_a_second_turn_before_every_other_has_had_one(
    counts: dict[str, int],
) -> None:
    arrived = [f"{client}{i}" for client, number in counts.items() for i in range(number)]
    queue, sequences = queue_of(*arrived)
    order = list(admitted(queue, sequences))[: AGING_PERIOD - 1]
    taken = dict.fromkeys(counts, 0)
    for name in order:
        client = name[0]
        for other in counts:
            assert taken[client] <= taken[other] or taken[other] == counts[other]
        assert name == f"{client}{taken[client]}"
        taken[client] += 1


class Waiting(RuleBasedStateMachine):
    """Any sequence of operations: who was put in and not taken out is there, once."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.arrivals = Arrivals()
        self.present: list[Sequence] = []
        self.gone: list[Sequence] = []

    @rule(
        client=st.sampled_from("ab"),
        priority=st.integers(0, 2),
        first=st.booleans(),
        num_tokens=st.integers(1, 4),
    )
    def put(self, client: str, priority: int, first: bool, num_tokens: int) -> None:
        sequence = self.arrivals.next(client, priority, num_tokens)
        (self.queue.push_front if first else self.queue.append)(sequence)
        self.present.append(sequence)

    @precondition(lambda self: self.present)
    @rule(data=st.data())
    def remove(self, data: Any) -> None:
        sequence = data.draw(st.sampled_from(self.present))
        assert self.queue.remove(sequence)
        self._take_out(sequence)

    @rule(clients=st.sampled_from(["ab", "a", "b", ""]))
    def admit(self, clients: str) -> None:
        sequence = self.queue.peek(lambda sequence: sequence.request.client in clients)
        able = [sequence for sequence in self.present if sequence.request.client in clients]
        if sequence is None:
            assert not able
            return
        assert sequence in able
        self.queue.admit(sequence)
        self._take_out(sequence)

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def remove_again(self, data: Any) -> None:
        assert not self.queue.remove(data.draw(st.sampled_from(self.gone)))

    def _take_out(self, sequence: Sequence) -> None:
        self.present.remove(sequence)
        self.gone.append(sequence)

    @invariant()
    def holds_what_is_present(self) -> None:
        assert len(self.queue) == len(self.present)
        assert self.queue.num_tokens == sum(len(s.request.prompt_ids) for s in self.present)
        ids = [sequence.seq_id for sequence in self.queue]
        assert sorted(ids) == [
            sequence.seq_id for sequence in sorted(self.present, key=lambda s: s.seq_id)
        ]


TestWaiting = Waiting.TestCase
TestWaiting.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
