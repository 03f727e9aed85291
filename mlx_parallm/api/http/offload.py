"""Keeps long computations off the event loop, and shares threads out among clients."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from typing_extensions import override

from mlx_parallm.fairness import ClientPace, SharedBudget, Stay

T = TypeVar("T")

# LONG_TEXT_CHARS: longer texts are tokenised on a thread; they would delay every stream by more
# than a millisecond.
LONG_TEXT_CHARS = 2048
# LONG_BODY_BYTES: work on longer bodies runs on a thread; it may delay streams by milliseconds.
LONG_BODY_BYTES = 64 * 1024
# MAX_THREADS: each takes up to some 200 bytes of memory for every byte of a text that it tokenises.
MAX_THREADS = 8
# PACED_SHARE: share of all processors that one client's long texts may use while others are here.
# MLX's CPU backend computes on all processors: a single busy one doubles a step's time.
PACED_SHARE = 1 / 8
# BURST_S: seconds that a client's long texts may take at once: several megabytes of text.
BURST_S = 1.0


async def maybe_in_thread(work: Callable[[], T], length: int) -> T:
    """Return the result of ``work``, which runs on a thread if its text of ``length`` is long."""
    return await in_thread(work) if length > LONG_TEXT_CHARS else work()


async def on_body(num_bytes: int, work: Callable[[], T]) -> T:
    """Return the result of ``work`` on a body, which runs on a thread if the body is long."""
    return await in_thread(work) if num_bytes > LONG_BODY_BYTES else work()


async def in_thread(work: Callable[[], T]) -> T:
    """Return the result of ``work``, from one of the threads that the request's client may use."""
    serving = _SERVING.get()
    if serving is None:
        return await asyncio.to_thread(work)
    threads, client = serving
    return await threads.run(client, work)


def current_client() -> str:
    """Return the client whose request runs; empty if there is none."""
    serving = _SERVING.get()
    return "" if serving is None else serving[1]


class TextThreads:
    """Threads of which one client uses half at most, so that others never wait for it.

    Waiting work begins in turns of the clients. While other clients are here, the time of a
    client's work drains at ``PACED_SHARE`` of the processors, and its next work waits until
    no more than ``BURST_S`` is left. The methods are called on one event loop.
    """

    def __init__(
        self, num_threads: int | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Prepare.

        Args:
            num_threads: at least 2; None: one for each processor, up to ``MAX_THREADS``.
            clock: seconds from any beginning.
        """
        num_processors = os.cpu_count() or 1
        num_threads = num_threads or max(2, min(MAX_THREADS, num_processors))
        self._clock = clock
        self._pace = ClientPace(clock, rate=num_processors * PACED_SHARE, burst=BURST_S)
        self._threads = SharedBudget(num_threads, pace=self._pace)
        self._executor = ThreadPoolExecutor(num_threads, "texts")

    def serving(self, client: str) -> Serving:
        """Let ``in_thread`` use these threads for a client, which counts as being here."""
        return Serving(self, client)

    def enter(self, client: str) -> None:
        """Count a client as being here, until ``leave``."""
        self._threads.enter(client)

    def leave(self, client: str) -> None:
        """Count a client as being here no more."""
        self._threads.leave(client)

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """Return the result of ``work``, which begins when the client's turn comes.

        The thread is in use until ``work`` ends, even if the caller was cancelled before.
        """
        await self._threads.acquire(1, client)
        context = contextvars.copy_context()
        loop, begin_s = asyncio.get_running_loop(), self._clock()
        running: Future[T] = self._executor.submit(context.run, work)
        running.add_done_callback(functools.partial(self._end_later, loop, client, begin_s))
        return await asyncio.wrap_future(running)

    def _end_later(
        self, loop: asyncio.AbstractEventLoop, client: str, begin_s: float, _: Future[Any]
    ) -> None:
        seconds = self._clock() - begin_s
        with contextlib.suppress(RuntimeError):
            # A closed loop has no client that waits for a thread.
            loop.call_soon_threadsafe(self._end, client, seconds)

    def _end(self, client: str, seconds: float) -> None:
        self._pace.delay(client, seconds)
        self._threads.release(1, client)


class Serving(Stay):
    """A block in which ``in_thread`` uses threads for a client."""

    def __init__(self, threads: TextThreads, client: str) -> None:
        super().__init__(threads, client)
        self._value = threads, client

    @override
    def __enter__(self) -> None:
        self._token = _SERVING.set(self._value)
        super().__enter__()

    @override
    def __exit__(self, *_: object) -> None:
        super().__exit__()
        _SERVING.reset(self._token)


#: The threads and the client of the current request; each request has a context of its own.
_SERVING: contextvars.ContextVar[tuple[TextThreads, str] | None] = contextvars.ContextVar(
    "serving", default=None
)
