"""Keeps long computations off the event loop, and shares threads out among clients."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

# A text longer than this is tokenised on a worker thread: it would hold up every stream by more
# than a millisecond.
LONG_TEXT_CHARS = 2048
# Each takes up to some 200 bytes of memory for every byte of a text that it tokenises.
MAX_THREADS = 8


async def maybe_in_thread(work: Callable[[], T], length: int) -> T:
    """The result of ``work`` on a text of ``length`` characters."""
    return await in_thread(work) if length > LONG_TEXT_CHARS else work()


async def in_thread(work: Callable[[], T]) -> T:
    """The result of ``work``, from one of the threads that the request's client may use."""
    serving = _SERVING.get()
    if serving is None:
        return await asyncio.to_thread(work)
    threads, client = serving
    return await threads.run(client, work)


class TextThreads:
    """Threads of which one client gets half at most, so that others never wait for it.

    What waits begins by turns of the clients. The methods are called on one event loop.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        """``num_threads``: at least 2; None: one for each processor, up to ``MAX_THREADS``."""
        self._num_threads = num_threads or max(2, min(MAX_THREADS, os.cpu_count() or 1))
        self._num_free = self._num_threads
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._executor = ThreadPoolExecutor(self._num_threads, "texts")

    @contextlib.contextmanager
    def serving(self, client: str) -> Iterator[None]:
        """Within it, ``in_thread`` uses these threads for a client."""
        token = _SERVING.set((self, client))
        try:
            yield
        finally:
            _SERVING.reset(token)

    async def run(self, client: str, work: Callable[[], T]) -> T:
        """The result of ``work``, which begins when the client's turn comes.

        The thread is taken until ``work`` ends, even if the caller was cancelled before.
        """
        await self._turn(client)
        context = contextvars.copy_context()
        running: Future[T] = self._executor.submit(context.run, work)
        leave = functools.partial(self._leave_later, asyncio.get_running_loop(), client)
        running.add_done_callback(leave)
        return await asyncio.wrap_future(running)

    async def _turn(self, client: str) -> None:
        if not self._may_begin(client):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(client, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._leave(client)
                raise
            return
        self._take(client)

    def _may_begin(self, client: str) -> bool:
        return self._num_free > 0 and self._running[client] < self._num_threads // 2

    def _take(self, client: str) -> None:
        self._num_free -= 1
        self._running[client] += 1

    def _leave_later(self, loop: asyncio.AbstractEventLoop, client: str, _: Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):
            # The loop is closed, so no client waits for a thread.
            loop.call_soon_threadsafe(self._leave, client)

    def _leave(self, client: str) -> None:
        self._num_free += 1
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        for waiting in list(self._waiting):
            self._begin_next(waiting)

    def _begin_next(self, client: str) -> None:
        """Let the client's next work begin, if it may; it is the last client in line then."""
        line = self._waiting[client]
        while line and line[0].done():
            line.popleft()
        if line and self._may_begin(client):
            self._take(client)
            line.popleft().set_result(None)
            self._waiting[client] = self._waiting.pop(client)
        if not line:
            del self._waiting[client]


#: Whose request this is, and the threads for it; each request has a context of its own.
_SERVING: contextvars.ContextVar[tuple[TextThreads, str] | None] = contextvars.ContextVar(
    "serving", default=None
)
