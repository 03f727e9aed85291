"""Commands from an event loop to the engine thread, and what comes back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mlx_parallm.engine.commands import Command
from mlx_parallm.types.errors import ParallmError

# MAX_BEHIND: steps whose events the loop has not handled. Running further ahead of it only adds
# latency.
MAX_BEHIND = 4
# MAX_WAIT_S: seconds to wait for the loop, which may itself be waiting for the thread.
MAX_WAIT_S = 1.0


class Mailbox:
    """The messages between the event loop and the engines."""

    def __init__(self, send: Callable[[Command], None]) -> None:
        """Begin; ``send`` gives the engines a command without waiting for a reply."""
        self.send = send
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answers: set[asyncio.Future[Any]] = set()
        self._room = threading.Semaphore(MAX_BEHIND)
        self._is_paced = True

    async def ask(self, command: Callable[[Callable[[Any], None]], Command]) -> Any:
        """Return the thread's reply to a command; EngineDeadError if it dies before replying."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # Another loop will never handle the events that it has not handled yet.
            self._loop, self._room = loop, threading.Semaphore(MAX_BEHIND)
        answer: asyncio.Future[Any] = loop.create_future()

        def reply(result: Any) -> None:
            # A closed loop raises, and then no caller waits.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, answer, result)

        self.send(command(reply))
        # If the thread dies, ``fail`` settles the futures in this set.
        self._answers.add(answer)
        try:
            return await answer
        finally:
            self._answers.discard(answer)

    def post(self, callback: Callable[..., None], *arguments: object) -> None:
        """From the thread: run a callback on the loop, unless there is no loop."""
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(callback, *arguments)

    def deliver(self, callback: Callable[..., None], *arguments: object) -> None:
        """From the thread: ``post`` once the loop has handled most earlier deliveries."""
        room = self._room
        if self._loop is None or self._loop.is_closed():
            return
        has_room = self._is_paced and room.acquire(timeout=MAX_WAIT_S)

        def take() -> None:
            if has_room:
                room.release()
            callback(*arguments)

        self.post(take)

    def stop_pacing(self) -> None:
        """Stop pacing deliveries: the thread is to end, whether the loop turns or waits for it."""
        self._is_paced = False
        self._room.release()

    def fail(self, error: ParallmError) -> None:
        """Give every waiting caller this error."""
        for answer in self._answers:
            _settle(answer, error)


def _settle(answer: asyncio.Future[Any], result: Any) -> None:
    if not answer.done():
        answer.set_result(result)
