"""Submits graphs to the device, on a thread of its own where this takes the host long."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Protocol

import mlx.core as mx
from typing_extensions import override

from mlx_parallm.worker.device.properties import backend_name


class Dispatch(Protocol):
    """A graph that is being submitted, or was."""

    def end(self) -> None:
        """Wait until MLX has submitted all of it; raise what stopped it."""
        ...


class Dispatcher:
    """Submits one graph after the other; only the latest may still be under way.

    On CUDA ``mx.async_eval`` takes the host some 10 µs a kernel, without the interpreter lock. On a
    thread of its own it leaves the engine thread free for the results of the step before and the
    schedule of the next one (``docs/decisions/057-a-thread-submits-graphs.md``).

    MLX is not made for two threads that use one stream or one array. Call ``join`` before anything
    is evaluated or traced, and before outputs of operations of the graph under way are dropped;
    arrays that no operation made may be. Meanwhile the caller may read arrays that are no part of
    that graph. It may also build the next graph, if every array which that takes from this one is
    its operation's only output, and the caller keeps a reference to the array until ``join``.
    """

    def begin(self, arrays: Sequence[Any]) -> Dispatch:
        """Begin to submit a tree of arrays, in the order of the calls.

        Raises:
            RuntimeError: MLX refused it, on the calling thread.
        """
        mx.async_eval(arrays)
        return _SUBMITTED

    def join(self) -> None:
        """Wait until nothing is being submitted. What failed is raised by ``Dispatch.end``."""

    def close(self) -> None:
        """Wait until nothing is being submitted; nothing more will be."""

    @property
    def runs_beside(self) -> bool:
        """True if the caller goes on while a graph is being submitted."""
        return False


class ThreadDispatcher(Dispatcher):
    """Submits on a thread of its own. Every other call comes from the thread that made it."""

    def __init__(self) -> None:
        self._thread = _Thread("dispatch")
        _first_thread()
        # Both threads use its queue of kernels, in turns. Without a default stream, MLX would make
        # one for the other thread, and may abort a process whose thread ends with a stream.
        stream = _stream_of(threading.current_thread())
        mx.set_default_stream(stream)
        self._thread.submit(mx.set_default_stream, stream).result()
        self._latest: Future[None] | None = None

    @override
    def begin(self, arrays: Sequence[Any]) -> Dispatch:
        self.join()
        has_begun = threading.Event()
        self._latest = self._thread.submit(_submit, arrays, has_begun)
        # Otherwise the thread would wait for the interpreter lock as long as a switch takes, 5 ms.
        has_begun.wait()
        return _OnThread(self._latest)

    @override
    def join(self) -> None:
        latest, self._latest = self._latest, None
        if latest is not None:
            latest.exception()

    @override
    def close(self) -> None:
        self.join()
        self._thread.close()

    @property
    @override
    def runs_beside(self) -> bool:
        return True


def dispatcher_of_device() -> Dispatcher:
    """Return what submits to the default device fastest; call it once for a thread."""
    return ThreadDispatcher() if backend_name() == "cuda" else Dispatcher()


class _Submitted(Dispatch):
    """A graph that was submitted by the call."""

    @override
    def end(self) -> None:
        return


_SUBMITTED = _Submitted()


class _OnThread(Dispatch):
    """A graph that a thread submits, or has."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    @override
    def end(self) -> None:
        try:
            self._future.result()
        finally:
            # An error has this frame. With the future, it would keep itself and the graph alive.
            del self


def _submit(arrays: Sequence[Any], has_begun: threading.Event) -> None:
    has_begun.set()
    mx.async_eval(arrays)


class _Thread:
    """A thread that makes calls one after the other until it is closed.

    Threads of ``ThreadPoolExecutor`` end with the main thread, and engines may go on after it. The
    thread is a daemon, so that one which is not closed does not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        threading.Thread(target=_make_calls, args=(self._calls,), name=name, daemon=True).start()

    def submit(self, function: Callable[..., None], *arguments: object) -> Future[None]:
        """Have a call made after those before it; return its future."""
        future: Future[None] = Future()
        self._calls.put((future, function, arguments))
        return future

    def close(self) -> None:
        """Let the thread end after the calls before."""
        self._calls.put(None)


_Call = tuple[Future[None], Callable[..., None], tuple[object, ...]]


def _make_calls(calls: SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        future, function, arguments = call
        # A call is forgotten once it is made, because its arguments are graphs.
        del call
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001 - raised by ``Future.result``
            future.set_exception(error)
        else:
            future.set_result(None)
        del future, function, arguments


@functools.cache
def _first_thread() -> _Thread:
    """Let a thread that stays be the first to use MLX, unless another one was; return it.

    MLX knows that thread by its number, which must not become another one's. It keeps the CUDA
    events that the thread drops for it alone (``CudaEventPool``), and an engine thread drops one of
    each step. Where the thread clears its streams, as an engine thread does at its end, it clears
    those of all dispatchers too (``gpu::clear_streams``).
    """
    thread = _Thread("first-of-mlx")
    thread.submit(mx.clear_cache).result()
    return thread


@functools.cache
def _stream_of(thread: threading.Thread) -> mx.Stream:
    """Return the stream for graphs that a thread builds and another one submits.

    Engines on several threads have one each.
    """
    del thread
    return mx.new_thread_unsafe_stream(mx.default_device())
