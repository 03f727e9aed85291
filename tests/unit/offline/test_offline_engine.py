"""``OfflineEngine`` over a scripted runner: callers on any thread, interrupts, and its end."""

from __future__ import annotations

import asyncio
import gc
import linecache
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from types import FrameType
from typing import Any

import pytest

from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.kind import BuiltModel
from mlx_parallm.offline import engine as engine_module
from mlx_parallm.offline.completions import RequestOutput
from mlx_parallm.offline.engine import OfflineEngine
from mlx_parallm.offline.generation import run
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.types.errors import (
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    ParallmError,
    RequestAbortedError,
    StepError,
)
from mlx_parallm.types.request import GenerateRequest
from mlx_parallm.types.step import ScheduledBatch, StepInFlight
from tests.fakes import FakeRunner, FakeStep, spell
from tests.scripted_engine import engine_of, make_request
from tests.scripted_process import builder

pytestmark = pytest.mark.usefixtures("short_searches_for_garbage")

HELLO = "hello"


class Gate(FakeRunner):
    """A runner that notes the batches of steps, and waits before each while it is closed."""

    def __init__(self) -> None:
        super().__init__(spell(HELLO))
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()
        self.sizes: list[int] = []

    def submit(self, batch: ScheduledBatch) -> FakeStep:
        self.reached.set()
        self.open.wait()
        self.sizes.append(len(batch.sequences))
        return super().submit(batch)


@pytest.fixture
def runner() -> Gate:
    return Gate()


@pytest.fixture
def engine(runner: Gate) -> Iterator[OfflineEngine]:
    engine = OfflineEngine(engine_of(builder(runner)))
    yield engine
    runner.open.set()
    engine.close()


def requests(*names: str, **params: Any) -> list[tuple[str | None, GenerateRequest]]:
    return [(None, make_request(name, **params)) for name in names]


def said(outputs: Sequence[RequestOutput]) -> list[str]:
    return [sample.text for output in outputs for sample in output.outputs]


def wait_for_ever(_: object) -> None:
    threading.Event().wait()


def on_a_thread(work: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Do something on another thread; the list gets what it returns, or raises."""
    results: list[object] = []

    def note() -> None:
        try:
            results.append(work())
        except ParallmError as error:
            results.append(error)

    thread = threading.Thread(target=note)
    thread.start()
    return thread, results


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


def test_nothing_works_after_close(engine: OfflineEngine) -> None:
    names = {thread.name for thread in threading.enumerate()}
    assert {"engine", "requests"} <= names
    engine.close()
    assert not {"engine", "requests"} & {thread.name for thread in threading.enumerate()}
    engine.close()
    with pytest.raises(InvalidRequestError, match="closed"):
        run(requests("a"), engine, None)
    with pytest.raises(InvalidRequestError, match="closed"):
        _ = engine.model


def test_a_call_ends_when_another_thread_closes(engine: OfflineEngine, runner: Gate) -> None:
    runner.open.clear()
    thread, results = on_a_thread(lambda: run(requests("a", "b"), engine, None))
    runner.reached.wait()
    closing, _ = on_a_thread(engine.close)
    thread.join()
    runner.open.set()
    closing.join()
    assert isinstance(results[0], RequestAbortedError)
    assert str(results[0]) == "The LLM was closed."


def test_a_coroutine_ends_when_another_thread_closes(engine: OfflineEngine) -> None:
    begun = threading.Event()

    async def work(_: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    thread, results = on_a_thread(lambda: engine.call(work))
    begun.wait()
    engine.close()
    thread.join()
    assert isinstance(results[0], RequestAbortedError)


def interrupted_at_line(work: Callable[[], Any], last: int) -> bool:
    """Interrupt work at a line of the engine's module; return False if it ran fewer lines."""
    num_lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal num_lines
        if frame.f_code.co_filename != engine_module.__file__:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        # The line of a block is visited again before its lock is released, where the interpreter
        # looks for no signal.
        if event == "line" and not line.lstrip().startswith("with "):
            num_lines += 1
            if num_lines == last:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_close_that_is_interrupted_anywhere_can_be_repeated() -> None:
    before = set(threading.enumerate())
    last = 0
    for last in count(1):
        engine = OfflineEngine(engine_of(builder(FakeRunner(spell(HELLO)))))
        was_interrupted = interrupted_at_line(engine.close, last)
        engine.close()
        assert set(threading.enumerate()) == before
        with pytest.raises(InvalidRequestError, match="closed"):
            run(requests("a"), engine, None)
        if not was_interrupted:
            break
    assert last > 5


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


# The error ends the thread that stops the engine.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_no_close_waits_for_a_stop_that_failed(
    engine: OfflineEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = engine.client.stop

    def fail() -> None:
        stop()
        raise RuntimeError

    monkeypatch.setattr(engine.client, "stop", fail)
    engine.close()
    with pytest.raises(InvalidRequestError, match="closed"):
        run(requests("a"), engine, None)


# The event loop of a thread that was not started is closed by its collection.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_start_that_is_interrupted_anywhere_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    kept: list[OfflineEngine] = []

    def start() -> None:
        kept.append(OfflineEngine(engine_of(builder(FakeRunner(spell(HELLO))))))
        kept[-1].close()

    last = 0
    for last in count(1):
        was_interrupted = interrupted_at_line(start, last)
        kept.clear()
        gc.collect()
        for thread in set(threading.enumerate()) - before:
            thread.join()
        if not was_interrupted:
            break
    assert last > 10


def test_an_interrupt_ends_the_wait_of_a_close(engine: OfflineEngine, runner: Gate) -> None:
    runner.open.clear()
    caller, _ = on_a_thread(lambda: run(requests("a"), engine, None))
    runner.reached.wait()
    main = threading.get_ident()

    def interrupt() -> None:
        while not engine._thread.is_ending:
            pass
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    thread.join()
    caller.join()
    runner.open.set()
    engine.close()
    assert not {"engine", "requests"} & {thread.name for thread in threading.enumerate()}


def test_every_close_returns_once_the_engine_has_ended(engine: OfflineEngine, runner: Gate) -> None:
    runner.open.clear()
    caller, _ = on_a_thread(lambda: run(requests("a"), engine, None))
    runner.reached.wait()

    def close() -> set[str]:
        engine.close()
        return {"engine", "requests"} & {thread.name for thread in threading.enumerate()}

    first, left = on_a_thread(close)
    while not engine._thread.is_ending:
        pass
    second, also_left = on_a_thread(close)
    runner.open.set()
    for thread in (caller, first, second):
        thread.join()
    assert left == also_left == [set()]


class Held:
    """The end of an engine, which needs a lock.

    Attributes:
        has_ended: set once it has ended.
    """

    def __init__(self, engine: OfflineEngine) -> None:
        self.lock = threading.Lock()
        self.has_ended = threading.Event()
        self._stop = engine.client.stop
        engine.client.stop = self  # type: ignore[method-assign]

    def __call__(self) -> None:
        with self.lock:
            self._stop()
        self.has_ended.set()


def collected() -> Held:
    """Return the end of an engine that garbage collection will find."""
    engine = OfflineEngine(engine_of(builder(FakeRunner(spell(HELLO)))))
    cycle: list[Any] = [engine]
    cycle.append(cycle)
    return Held(engine)


def test_a_collection_takes_no_lock_that_the_end_needs() -> None:
    end = collected()
    with end.lock:
        gc.collect()
        assert not end.has_ended.is_set()
    end.has_ended.wait()


def test_an_engine_begins_to_load_when_those_have_ended_that_were_collected() -> None:
    end = collected()
    with end.lock:
        gc.collect()
        seen: list[bool] = []
        build = builder(FakeRunner(spell(HELLO)))

        def noting(*details: Any) -> list[BuiltModel]:
            seen.append(end.has_ended.is_set())
            return list(build(*details))

        thread, _ = on_a_thread(lambda: OfflineEngine(engine_of(noting)).close())
    thread.join()
    assert seen == [True]


# EXIT: a program whose engine has not ended when it exits.
EXIT = """
import gc, sys
from mlx_parallm.offline.engine import OfflineEngine
from tests.fakes import FakeRunner, spell
from tests.scripted_engine import engine_of
from tests.scripted_process import builder

engine = OfflineEngine(engine_of(builder(FakeRunner(spell("hello")))))
stop = engine.client.stop

def noted_stop():
    stop()
    print("ended", flush=True)

engine.client.stop = noted_stop
how = sys.argv[1]
if how == "collected":
    cycle = [engine]
    cycle.append(cycle)
    del engine, cycle
    gc.collect()
elif how == "interrupted":
    def interrupted():
        raise KeyboardInterrupt
    engine._thread.end = interrupted
    engine.close()
print("exits", flush=True)
"""


@pytest.mark.parametrize("how", ["left", "collected", "interrupted"])
def test_a_program_exits_once_its_engine_has_ended(how: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", EXIT, how], capture_output=True, text=True, check=False
    )
    assert ended.stdout.count("ended") == 1, ended
    assert ended.returncode == (-signal.SIGINT if how == "interrupted" else 0), ended
    assert "Exception ignored" not in ended.stderr


@pytest.mark.parametrize("is_main", [True, False])
def test_threads_end_with_the_object(is_main: bool) -> None:
    before = set(threading.enumerate())

    def use() -> None:
        engine = OfflineEngine(engine_of(builder(FakeRunner(spell(HELLO)))))
        cycle: list[Any] = [engine]
        cycle.append(cycle)
        assert said(run(requests("a"), engine, None)) == [HELLO]
        del engine, cycle
        gc.collect()

    if is_main:
        use()
    else:
        thread, results = on_a_thread(use)
        thread.join()
        assert results == [None]
    for thread in set(threading.enumerate()) - before:
        thread.join()


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
