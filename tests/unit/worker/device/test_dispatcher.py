"""Graphs are submitted one after the other, by the caller or by a thread beside it."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.worker.device import dispatcher
from mlx_parallm.worker.device.dispatcher import (
    Dispatcher,
    ThreadDispatcher,
    dispatcher_of_device,
)


@pytest.fixture(autouse=True)
def default_stream() -> Iterator[None]:
    """Restore the thread's default stream, which a dispatcher with a thread replaces."""
    before = mx.default_stream(mx.default_device())
    yield
    mx.set_default_stream(before)


class Gate:
    """Stands for ``mx.async_eval``: it takes as long as the test says, and counts its callers."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_entered = threading.Event()
        self.finished: list[object] = []
        self._busy = threading.Lock()

    def __call__(self, arrays: object) -> None:
        assert self._busy.acquire(blocking=False), "two graphs are submitted at once"
        self.is_entered.set()
        assert self.is_open.wait()
        self.finished.append(arrays)
        self._busy.release()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    monkeypatch.setattr(mx, "async_eval", gate)
    return gate


def test_the_caller_goes_on_while_a_graph_is_submitted(gate: Gate) -> None:
    dispatcher = ThreadDispatcher()
    dispatch = dispatcher.begin(["first"])
    assert dispatcher.runs_beside
    assert gate.is_entered.wait()
    assert gate.finished == [], "the caller has waited"
    gate.is_open.set()
    dispatch.end()
    assert gate.finished == [["first"]]


@pytest.mark.parametrize("joins", [False, True])
def test_graphs_are_submitted_in_their_order_and_one_at_a_time(gate: Gate, joins: bool) -> None:
    gate.is_open.set()
    dispatcher = ThreadDispatcher()
    for number in range(200):
        dispatcher.begin([number])
        if joins:
            dispatcher.join()
            assert len(gate.finished) == number + 1
    dispatcher.join()
    assert gate.finished == [[number] for number in range(200)]


def test_the_next_call_waits_for_the_graph_before(gate: Gate) -> None:
    dispatcher = ThreadDispatcher()
    dispatcher.begin(["first"])
    assert gate.is_entered.wait()
    opener = threading.Thread(target=gate.is_open.set)
    opener.start()
    second = dispatcher.begin(["second"])
    assert gate.finished[0] == ["first"]
    second.end()
    opener.join()
    assert gate.finished == [["first"], ["second"]]


def test_close_waits_for_the_graph_and_ends_the_thread(gate: Gate) -> None:
    before = set(threading.enumerate())
    dispatcher = ThreadDispatcher()
    (own,) = {each for each in threading.enumerate() if each.name == "dispatch"} - before
    dispatcher.begin(["last"])
    assert gate.is_entered.wait()
    opener = threading.Thread(target=gate.is_open.set)
    opener.start()
    dispatcher.close()
    assert gate.finished == [["last"]]
    own.join()
    opener.join()


def test_graphs_are_submitted_after_the_main_thread_has_ended() -> None:
    """Threads of ``ThreadPoolExecutor`` would have ended with it."""
    code = (
        "import threading\n"
        "import mlx.core as mx\n"
        "from mlx_parallm.worker.device.dispatcher import ThreadDispatcher\n"
        "def engine():\n"
        "    threading.main_thread().join()\n"
        "    dispatcher, x = ThreadDispatcher(), mx.arange(3) + 1\n"
        "    dispatcher.begin([x]).end()\n"
        "    print(x.tolist())\n"
        "    dispatcher.close()\n"
        "threading.Thread(target=engine).start()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[1, 2, 3]\n"


def test_what_stops_a_graph_is_raised_by_its_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(arrays: object) -> None:
        if arrays == ["large"]:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(mx, "async_eval", refuse)
    dispatcher = ThreadDispatcher()
    large = dispatcher.begin(["large"])
    dispatcher.join()
    small = dispatcher.begin(["small"])
    small.end()
    with pytest.raises(RuntimeError, match="out of memory"):
        large.end()


def test_a_refused_graph_is_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most graphs are refused for want of memory, and a cycle would keep what they took."""

    class Graph:
        pass

    def refuse(_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(mx, "async_eval", refuse)
    dispatcher, graph = ThreadDispatcher(), Graph()
    left = weakref.ref(graph)
    dispatch = dispatcher.begin([graph])
    del graph
    # The thread has let go of it once it has begun with another one.
    dispatcher.begin([])
    gc.disable()
    try:
        with contextlib.suppress(RuntimeError):
            dispatch.end()
        del dispatch
        assert left() is None
    finally:
        gc.enable()


def test_without_a_thread_the_call_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(arrays: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(mx, "async_eval", refuse)
    with pytest.raises(RuntimeError, match="out of memory"):
        Dispatcher().begin([mx.ones(1)])


def test_engines_on_two_threads_share_no_stream() -> None:
    def stream() -> mx.Stream:
        ThreadDispatcher()
        return mx.default_stream(mx.default_device())

    streams = [stream()]
    # The second may get the number of the first, which has cleared its streams.
    for _ in range(2):
        with ThreadPoolExecutor(1) as other:
            streams.append(other.submit(stream).result())
    assert len(set(map(str, streams))) == len(streams)
    assert stream() == streams[0], "what a thread has traced stays on its stream"


def test_its_thread_makes_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher, seen = ThreadDispatcher(), list[mx.Stream]()
    monkeypatch.setattr(
        mx, "async_eval", lambda _: seen.append(mx.default_stream(mx.default_device()))
    )
    dispatcher.begin([]).end()
    assert seen == [mx.default_stream(mx.default_device())]


@pytest.mark.parametrize("make", [Dispatcher, ThreadDispatcher])
def test_graphs_of_one_thread_are_submitted_by_the_dispatcher(make: type[Dispatcher]) -> None:
    """Each graph reads the result of the one before, which is read here from a copy meanwhile."""
    dispatcher = make()
    x, copies = mx.zeros((8, 8), mx.int32), []
    for _ in range(100):
        x = (mx.cumsum(x, axis=1) + 1) % 7
        copy = x + 0
        dispatcher.begin([x, copy])
        if copies:
            np.array(copies[-1])
        copies.append(copy)
        dispatcher.join()
    expected = np.zeros((8, 8), np.int32)
    for copy in copies:
        expected = (np.cumsum(expected, axis=1) + 1) % 7
        assert (np.array(copy) == expected).all()


@pytest.mark.parametrize(
    ("backend", "is_beside"), [("cuda", True), ("metal", False), ("cpu", False)]
)
def test_a_thread_submits_on_cuda(
    backend: str, is_beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_parallm.worker.device.dispatcher.backend_name", lambda: backend)
    assert dispatcher_of_device().runs_beside is is_beside


def test_a_thread_that_stays_is_the_first_to_use_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX would keep an event of every step for an engine thread that was the first."""
    calls: list[tuple[str, bool]] = []
    own = threading.get_ident()

    def noted(name: str) -> None:
        original = getattr(mx, name)

        def call(*args: object) -> object:
            calls.append((name, threading.get_ident() == own))
            return original(*args)

        monkeypatch.setattr(mx, name, call)

    noted("clear_cache")
    noted("new_thread_unsafe_stream")
    noted("set_default_stream")
    monkeypatch.setattr(dispatcher, "_stream_of", dispatcher._stream_of.__wrapped__)
    monkeypatch.setattr(dispatcher, "_first_thread", dispatcher._first_thread.__wrapped__)
    ThreadDispatcher()
    assert calls == [
        ("clear_cache", False),
        ("new_thread_unsafe_stream", True),
        ("set_default_stream", True),
        ("set_default_stream", False),
    ]
