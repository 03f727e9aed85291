"""A pooling engine: each request gets its own answer or failure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlx_parallm.types.errors import OverloadedError, RequestAbortedError, StepError
from mlx_parallm.types.pooling import PoolingResults
from tests.sum_encoder import (
    NAN,
    NUM_STAGES,
    POISON,
    RepliedEngine,
    SumEncoder,
    engine_of,
    request_of,
    seconds_of,
)


def make(
    max_waiting: int = 100, cache_bytes: int = 0
) -> tuple[RepliedEngine, SumEncoder, dict[str, Any]]:
    encoder = SumEncoder()
    return engine_of(encoder, max_waiting=max_waiting, cache_bytes=cache_bytes), encoder, {}


def ask(
    engine: RepliedEngine, answers: dict[str, Any], name: str, *inputs: tuple[int, ...]
) -> None:
    engine.add(request_of(name, *inputs), lambda answer: answers.__setitem__(name, plain(answer)))


def plain(answer: Any) -> Any:
    return [vector.tolist() for vector in answer] if isinstance(answer, list) else answer


def run(engine: RepliedEngine, within_s: float | None = None) -> int:
    turns = 0
    while engine.has_work():
        engine.step(within_s)
        turns += 1
    return turns


def test_vectors_are_in_the_order_of_the_inputs() -> None:
    engine, encoder, answers = make()
    ask(engine, answers, "a", (5, 6, 7), (1,), (5, 6, 7))
    ask(engine, answers, "b", (1,), (2, 2))
    run(engine)
    assert answers["a"] == [[18, 3], [1, 1], [18, 3]]
    assert answers["b"] == [[1, 1], [4, 2]]
    assert sorted(item for batch in encoder.batches for item in batch) == [(1,), (2, 2), (5, 6, 7)]


def test_batches_take_what_streams_may_wait_once_their_cost_is_known() -> None:
    engine, encoder, answers = make()
    for number in range(12):
        ask(engine, answers, f"warm{number}", *[(number, n) for n in range(number % 7 + 1)])
        run(engine)
    encoder.batches.clear()
    ask(engine, answers, "a", *[(n, n, n, n) for n in range(15)])
    turns = run(engine, within_s=seconds_of([(0,) * 24]))
    sizes = [len(batch) for batch in encoder.batches]
    assert sum(sizes) == 15
    assert max(sizes) <= 6
    assert turns == len(sizes) <= 4
    assert len(answers["a"]) == 15


@pytest.mark.parametrize(("joins", "wanted"), [(False, 2), (True, 1)])
def test_texts_of_other_lengths_share_a_launch_unless_streams_wait(
    joins: bool, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.sum_encoder.LAUNCH_S", 0.1)
    encoder = SumEncoder()
    engine, answers = engine_of(encoder, max_tokens=200, joins_lengths=joins), {}
    for number in range(1, 12):
        ask(engine, answers, f"warm{number}", *[(number, n) for n in range(number)])
        ask(engine, answers, f"long{number}", (number,) * 9 * number)
        run(engine)
    for within_s, batches in ((None, wanted), (1.0, 2)):
        encoder.batches.clear()
        ask(engine, answers, "short", (1, 1))
        ask(engine, answers, "longer", (2,) * 40)
        run(engine, within_s)
        assert len(encoder.batches) == batches
        assert (answers["short"], answers["longer"]) == ([[2, 2]], [[80, 40]])


def test_what_takes_longer_is_computed_over_several_turns() -> None:
    engine, encoder, answers = make()
    ask(engine, answers, "warm", tuple(range(60)))
    run(engine)
    ask(engine, answers, "long", (5,) * 60)
    stage_s = seconds_of([(5,) * 60]) / NUM_STAGES
    begin_s = encoder.clock.now_s
    engine.step(1.5 * stage_s)
    assert encoder.clock.now_s - begin_s == pytest.approx(stage_s)
    # What is being computed is computed once.
    ask(engine, answers, "same", (5,) * 60, (7,))
    engine.step(2.1 * stage_s)
    assert encoder.clock.now_s - begin_s == pytest.approx(3 * stage_s)
    assert engine.has_work()
    engine.step(1.5 * stage_s)
    assert answers["long"] == [[300, 60]]
    run(engine)
    assert answers["same"] == [[300, 60], [7, 1]]
    assert encoder.batches == [[tuple(range(60))], [(5,) * 60], [(7,)]]


def test_a_batch_under_way_ends_at_once_when_nobody_waits_for_it() -> None:
    engine, _, answers = make()
    ask(engine, answers, "a", (5,) * 60)
    engine.step(0.0)
    assert not answers
    engine.step()
    assert answers["a"] == [[300, 60]]


def test_a_client_may_go_while_its_batch_is_under_way() -> None:
    engine, _, answers = make()
    ask(engine, answers, "gone", (5,) * 60)
    engine.step(0.0)
    assert engine.abort("gone")
    assert isinstance(answers.pop("gone"), RequestAbortedError)
    ask(engine, answers, "here", (1,))
    run(engine)
    assert answers == {"here": [[1, 1]]}


def test_a_batch_waits_for_others_until_it_is_full_or_its_time_is_up() -> None:
    encoder = SumEncoder()
    engine, answers = engine_of(encoder, max_wait_s=0.005), {}
    ask(engine, answers, "a", (1,))
    assert engine.ready_in_s() == pytest.approx(0.005)
    encoder.clock.now_s += 0.003
    ask(engine, answers, "b", (2,) * 62)
    assert engine.ready_in_s() == pytest.approx(0.002)
    ask(engine, answers, "c", (3,))
    assert engine.ready_in_s() == 0
    engine.abort("c")
    assert engine.ready_in_s() == pytest.approx(0.002)
    encoder.clock.now_s += 0.0021
    assert engine.ready_in_s() == 0
    engine.step()
    assert "a" in answers
    assert engine.ready_in_s() == pytest.approx(0.0029 - seconds_of([(1,)]))


def test_a_failed_batch_ends_the_requests_in_it() -> None:
    engine, _, answers = make()
    ask(engine, answers, "bad", (POISON,), tuple(range(60)))
    run(engine)
    ask(engine, answers, "good", (1, 2))
    run(engine)
    assert isinstance(answers["bad"], StepError)
    assert answers["good"] == [[3, 2]]


def test_vectors_that_are_no_numbers_end_their_request_alone() -> None:
    engine, _, answers = make()
    ask(engine, answers, "bad", (NAN,), (3,))
    ask(engine, answers, "good", (3,), (4,))
    run(engine)
    assert isinstance(answers["bad"], StepError)
    assert answers["good"] == [[3, 1], [4, 1]]


def test_an_aborted_request_is_not_computed() -> None:
    engine, encoder, answers = make()
    ask(engine, answers, "gone", (1,), (2,))
    ask(engine, answers, "here", (2,))
    assert engine.abort("gone")
    assert not engine.abort("gone")
    run(engine)
    # Every command has one reply.
    assert list(answers) == ["gone", "here"]
    assert isinstance(answers["gone"], RequestAbortedError)
    assert encoder.batches == [[(2,)]]


def test_results_are_kept_and_say_so() -> None:
    engine, encoder, answers = make(cache_bytes=10_000)
    answered: list[PoolingResults] = []
    ask(engine, answers, "a", (1,), (2,), (1,))
    run(engine)
    request = request_of("b", (2,), (3,))
    engine.add(request, answered.append)
    assert not answered
    run(engine)
    engine.add(replace(request, request_id="c"), answered.append)
    assert not engine.has_work()
    assert [plain(results) for results in answered] == [[[2, 1], [3, 1]]] * 2
    assert [results.cache_hits for results in answered] == [(True, False), (True, True)]
    assert sorted(item for batch in encoder.batches for item in batch) == [(1,), (2,), (3,)]
    assert not engine.abort("c")


def test_shared_results_cannot_be_written() -> None:
    engine, _, _ = make(cache_bytes=10_000)
    answered: list[PoolingResults] = []
    engine.add(request_of("a", (1,)), answered.append)
    run(engine)
    with pytest.raises(ValueError, match="read-only"):
        answered[0][0][0] = 5


def test_failures_and_nans_are_not_kept() -> None:
    engine, encoder, answers = make(cache_bytes=10_000)
    for name, wrong in (("a", POISON), ("b", NAN)):
        for attempt in range(2):
            ask(engine, answers, f"{name}{attempt}", (wrong,))
            run(engine)
            assert isinstance(answers[f"{name}{attempt}"], StepError)
    assert len(encoder.batches) == 4


def test_kept_inputs_need_no_room_in_the_queue() -> None:
    engine, _, answers = make(max_waiting=2, cache_bytes=10_000)
    ask(engine, answers, "a", (1,), (2,))
    run(engine)
    ask(engine, answers, "b", (3,), (4,))
    ask(engine, answers, "c", (1,), (2,))
    assert len(answers["c"]) == 2


def test_a_full_queue_refuses_but_one_large_request_runs() -> None:
    engine, _, answers = make(max_waiting=2)
    ask(engine, answers, "large", (1,), (2,), (3,))
    ask(engine, answers, "late", (4,))
    assert isinstance(answers["late"], OverloadedError)
    run(engine)
    assert len(answers["large"]) == 3
