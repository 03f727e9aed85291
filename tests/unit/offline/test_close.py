"""The end of an ``OfflineEngine``: on any thread, interrupted anywhere, and once."""

from __future__ import annotations

import asyncio
import gc
import linecache
import signal
import sys
import threading
from collections.abc import Callable
from itertools import count
from types import FrameType
from typing import Any

import pytest

from mlx_parallm.offline import engine as engine_module
from mlx_parallm.offline.engine import OfflineEngine
from mlx_parallm.offline.generation import run
from mlx_parallm.types.errors import InvalidRequestError, RequestAbortedError
from tests.fakes import FakeRunner, spell
from tests.scripted_engine import engine_of
from tests.scripted_process import builder
from tests.unit.offline.gated_engine import HELLO, Gate, on_a_thread, requests

pytestmark = pytest.mark.usefixtures("short_searches_for_garbage")


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
