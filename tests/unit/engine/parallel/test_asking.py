"""Questions go to an engine that lives, equal ones to the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlx_parallm.engine.parallel.asking import SharedAsk
from mlx_parallm.engine.parallel.life import ParallelLife
from mlx_parallm.engine.status import Readiness
from mlx_parallm.types.errors import EngineDeadError, InvalidRequestError, RequestLostError

NUM_ENGINES = 4
NUM_KEYS = 200


class FakeEngine:
    """Implements ``Ask``: keeps the questions until a test has it answer or die."""

    def __init__(self) -> None:
        self.is_alive = True
        self.pending: list[tuple[Hashable, Future[Any]]] = []

    def __call__(self, question: Callable[[Any], Any], key: Hashable = None) -> Future[Any]:
        if not self.is_alive:
            raise EngineDeadError("No engine is loaded.")
        answer: Future[Any] = Future()
        self.pending.append((key, answer))
        return answer

    def die(self) -> None:
        self.is_alive = False
        pending, self.pending = self.pending, []
        for _, answer in pending:
            answer.set_exception(EngineDeadError("The engine's process has ended."))


def ignore(_: Any) -> None:
    """Ask nothing."""


@pytest.fixture
def engines() -> list[FakeEngine]:
    return [FakeEngine() for _ in range(NUM_ENGINES)]


@pytest.fixture
def ask(engines: list[FakeEngine]) -> SharedAsk:
    ask = SharedAsk()
    ask.engines = engines
    return ask


def keys_of(engine: FakeEngine) -> set[Hashable]:
    return {key for key, _ in engine.pending}


def test_equal_questions_go_to_the_same_engine(ask: SharedAsk, engines: list[FakeEngine]) -> None:
    for key in [*range(NUM_KEYS)] * 2:
        ask(ignore, key=key)
    keys = [keys_of(engine) for engine in engines]
    assert sum(map(len, keys)) == NUM_KEYS
    assert min(map(len, keys)) > NUM_KEYS / NUM_ENGINES / 3


def test_only_the_questions_of_a_dead_engine_go_elsewhere(
    ask: SharedAsk, engines: list[FakeEngine]
) -> None:
    answers = [ask(ignore, key=key) for key in range(NUM_KEYS)]
    before = [keys_of(engine) for engine in engines]
    engines[1].die()
    after = [keys_of(engine) for engine in engines]
    assert not after[1]
    assert all(after[rank] >= before[rank] for rank in (0, 2, 3))
    assert sum(map(len, after)) == NUM_KEYS
    for engine in engines:
        for key, answer in engine.pending:
            answer.set_result(key)
    assert [answer.result(0) for answer in answers] == list(range(NUM_KEYS))


@pytest.mark.parametrize(("num_engines", "num_asked"), [(2, 1), (3, 2), (4, 2)])
def test_a_question_that_kills_engines_ends_no_server(num_engines: int, num_asked: int) -> None:
    engines = [FakeEngine() for _ in range(num_engines)]
    ask = SharedAsk()
    ask.engines = engines
    ask.count_live = lambda: sum(engine.is_alive for engine in engines)
    answer = ask(ignore)
    while busy := [engine for engine in engines if engine.pending]:
        busy[0].die()
    assert sum(not engine.is_alive for engine in engines) == num_asked
    with pytest.raises(RequestLostError):
        answer.result(0)


@pytest.mark.parametrize("num_engines", [2, 3, 4])
def test_a_deadly_question_that_comes_again_ends_no_server(num_engines: int) -> None:
    engines = [FakeEngine() for _ in range(num_engines)]
    ask = SharedAsk()
    ask.engines = engines
    ask.count_live = lambda: sum(engine.is_alive for engine in engines)
    for number in range(num_engines):
        answer = ask(ignore, key="deadly")
        while busy := [engine for engine in engines if engine.pending]:
            busy[0].die()
        with pytest.raises(RequestLostError):
            answer.result(0)
        # A client may ask again while one engine is left, and others are asked meanwhile.
        other = ask(ignore, key=number)
        [(engine, inner)] = [(each, pending[1]) for each in engines for pending in each.pending]
        inner.set_result(number)
        engine.pending.clear()
        assert other.result(0) == number
    assert ask.count_live() == 1


def test_an_answer_ends_the_suspicion() -> None:
    engines = [FakeEngine() for _ in range(3)]
    ask = SharedAsk()
    ask.engines = engines
    ask.count_live = lambda: sum(engine.is_alive for engine in engines)
    answer = ask(ignore, key="innocent")
    next(engine for engine in engines if engine.pending).die()
    [engine] = [engine for engine in engines if engine.pending]
    engine.pending.pop()[1].set_result("answer")
    assert answer.result(0) == "answer"
    next(other for other in engines if other.is_alive and other is not engine).die()
    ask(ignore, key="innocent")
    assert engine.pending


def test_silent_engines_do_not_count() -> None:
    ask = SharedAsk()
    life = ParallelLife([], cast(Any, None), ask=ask)
    life._fleet = cast(Any, SimpleNamespace(readiness=lambda: list(Readiness)))
    assert ask.count_live() == len({Readiness.READY, Readiness.CATCHING_UP})


def test_no_engine_answers_if_all_are_dead(ask: SharedAsk, engines: list[FakeEngine]) -> None:
    pending = ask(ignore, key=1)
    for engine in engines:
        engine.die()
    for answer in (pending, ask(ignore, key=2)):
        with pytest.raises(EngineDeadError):
            answer.result(0)


def test_a_refusal_is_the_answer(ask: SharedAsk, engines: list[FakeEngine]) -> None:
    answer = ask(ignore)
    [(_, inner)] = [pending for engine in engines for pending in engine.pending]
    inner.set_exception(InvalidRequestError("no grammar"))
    with pytest.raises(InvalidRequestError, match="no grammar"):
        answer.result(0)


def test_a_cancelled_question_is_withdrawn(ask: SharedAsk, engines: list[FakeEngine]) -> None:
    answer = ask(ignore)
    [(_, inner)] = [pending for engine in engines for pending in engine.pending]
    assert answer.cancel()
    assert inner.cancelled()


def test_an_engine_that_dies_late_asks_nobody_for_a_cancelled_question(
    ask: SharedAsk, engines: list[FakeEngine]
) -> None:
    answer = ask(ignore)
    # The engine has begun, so that the question cannot be withdrawn.
    [(engine, inner)] = [(each, pending[1]) for each in engines for pending in each.pending]
    inner.set_running_or_notify_cancel()
    assert answer.cancel()
    engine.die()
    assert not any(other.pending for other in engines)
