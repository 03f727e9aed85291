"""``OfflineEngine`` over a scripted runner: callers on any thread, interrupts, loads and forks."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading

import pytest

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.kind import BuiltModel
from mlx_parallm.offline.completions import RequestOutput
from mlx_parallm.offline.engine import OfflineEngine
from mlx_parallm.offline.generation import run
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.types.errors import (
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    StepError,
)
from mlx_parallm.types.step import ScheduledBatch, StepInFlight
from tests.fakes import FakeRunner, spell
from tests.scripted_engine import engine_of, make_request
from tests.scripted_process import builder
from tests.unit.offline.gated_engine import HELLO, Gate, on_a_thread, requests, said

pytestmark = pytest.mark.usefixtures("short_searches_for_garbage")


def wait_for_ever(_: object) -> None:
    threading.Event().wait()


def test_callers_may_have_an_event_loop_or_another_thread(engine: OfflineEngine) -> None:
    async def call() -> list[str]:
        return said(run(requests("a"), engine, None))

    assert asyncio.run(call()) == [HELLO]
    thread, results = on_a_thread(lambda: said(run(requests("b"), engine, None)))
    thread.join()
    assert results == [[HELLO]]


def test_the_requests_of_a_call_share_every_step(engine: OfflineEngine, runner: Gate) -> None:
    names = [str(number) for number in range(8)]
    assert said(run(requests(*names), engine, None)) == [HELLO] * 8
    assert set(runner.sizes) == {8}


def test_calls_of_several_threads_run_side_by_side(engine: OfflineEngine, runner: Gate) -> None:
    runner.open.clear()
    first, results = on_a_thread(lambda: said(run(requests("a"), engine, None)))
    runner.reached.wait()
    second, more = on_a_thread(lambda: said(run(requests("b"), engine, None)))

    async def num_open(client: AsyncEngine) -> int:
        return len(client.open_requests())

    # The second does not wait for the end of the first.
    while engine.call(num_open) < 2:
        pass
    runner.open.set()
    first.join()
    second.join()
    assert results == more == [[HELLO]]


def test_outputs_come_in_order_and_each_end_is_noted_on_the_callers_thread(
    engine: OfflineEngine,
) -> None:
    ended: list[tuple[str, int]] = []
    made = requests("a", max_tokens=4) + requests("b", max_tokens=1) + requests("c", n=2)
    outputs = run(made, engine, lambda each: ended.append((each.request_id, threading.get_ident())))
    assert [output.request_id for output in outputs] == ["a", "b", "c"]
    assert said(outputs) == ["hell", "h", HELLO, HELLO]
    assert {thread for _, thread in ended} == {threading.get_ident()}
    assert [name for name, _ in ended] == ["b", "a", "c"]
    assert run([], engine, None) == []


def test_nothing_is_generated_if_a_request_is_refused(engine: OfflineEngine, runner: Gate) -> None:
    with pytest.raises(ModelNotFoundError):
        run([*requests("a"), (None, make_request("b", model="another"))], engine, None)
    assert not runner.sizes
    assert not engine.client.open_requests()
    assert said(run(requests("c", "d"), engine, None)) == [HELLO] * 2


def test_a_step_that_fails_raises_and_the_next_call_goes_on(
    engine: OfflineEngine, runner: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: ScheduledBatch) -> StepInFlight:
        raise ValueError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "submit", fail)
        with pytest.raises(StepError, match="a bug"):
            run(requests("a", "b"), engine, None)
    assert said(run(requests("c", "d"), engine, None)) == [HELLO] * 2


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c"]])
def test_an_interrupt_ends_the_requests_and_the_next_call_goes_on(
    engine: OfflineEngine, runner: Gate, names: list[str]
) -> None:
    runner.open.clear()
    main = threading.get_ident()

    def interrupt() -> None:
        runner.reached.wait()
        signal.pthread_kill(main, signal.SIGINT)
        # The caller's thread must get it while it waits for a step.
        runner.open.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run(requests(*names), engine, wait_for_ever)
    thread.join()
    assert not engine.client.open_requests()
    assert said(run(requests("d", "e"), engine, None)) == [HELLO] * 2


def test_an_error_of_the_callers_ends_the_other_requests(engine: OfflineEngine) -> None:
    def fail(_: RequestOutput) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        run(requests("a", max_tokens=1) + requests("b"), engine, fail)
    assert not engine.client.open_requests()
    assert said(run(requests("c"), engine, None)) == [HELLO]


def test_an_engine_whose_thread_cannot_be_started_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "engine":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="can't start new thread"):
        OfflineEngine(engine_of(builder(FakeRunner(spell(HELLO)))))
    assert set(threading.enumerate()) == before


def test_a_forked_process_may_not_use_it_and_harms_nothing(engine: OfflineEngine) -> None:
    child = os.fork()
    if child == 0:
        # The test's process may not go on here, whatever happens.
        try:
            engine.close()
            engine._thread.end()
            run(requests("a"), engine, None)
        except InvalidRequestError as error:
            os._exit(0 if "forked" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert said(run(requests("a"), engine, None)) == [HELLO]


def test_a_load_that_fails_raises_its_error_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())

    def build(*_: object) -> list[BuiltModel]:
        raise InvalidRequestError("no such model")

    with pytest.raises(InvalidRequestError, match="no such model"):
        OfflineEngine(engine_of(build, EngineConfig()))
    assert set(threading.enumerate()) == before


def test_an_interrupt_ends_a_load() -> None:
    before = set(threading.enumerate())
    main, ended = threading.get_ident(), threading.Event()

    def build(*_: object) -> list[BuiltModel]:
        signal.pthread_kill(main, signal.SIGINT)
        try:
            while True:
                ended.wait(1e-3)  # time limit: an exception is raised between two waits
        finally:
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        OfflineEngine(engine_of(build, EngineConfig()))
    assert ended.is_set()
    assert set(threading.enumerate()) == before


def test_garbage_collection_stays_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[str] = []
    for name in ("freeze", "unfreeze", "set_threshold", "disable"):
        monkeypatch.setattr(gc, name, lambda *_, name=name: changes.append(name))
    OfflineEngine(engine_of(builder(FakeRunner(spell(HELLO))))).close()
    assert changes == []


def test_a_dead_engine_refuses(runner: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(_: ScheduledBatch) -> StepInFlight:
        raise SystemExit

    engine = OfflineEngine(engine_of(builder(runner)))
    monkeypatch.setattr(runner, "submit", die)
    for _ in range(2):
        with pytest.raises(EngineDeadError):
            run(requests("a"), engine, None)
    engine.close()
