"""Commands from an event loop to the engine thread, and what comes back."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from mlx_parallm.engine.commands import Command
from mlx_parallm.types.errors import EngineDeadError

# Of steps whose events the loop has not seen to: more would only make it later for everybody.
MAX_BEHIND = 4
# A loop that does nothing for so long may be waiting for the thread.
MAX_WAIT_S = 1.0


class Mailbox:
    """What both sides put messages into.

    Attributes:
        inbox: that the thread reads.
    """

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answers: set[asyncio.Future[Any]] = set()
        self._room = threading.Semaphore(MAX_BEHIND)
        self._is_paced = True

    def tell(self, command: Command) -> None:
        """Send the thread a command that nobody waits for."""
        self.inbox.put(command)

    async def ask(self, command: Callable[[Callable[[Any], None]], Command]) -> Any:
        """What the thread replies to a command; EngineDeadError if it dies before that."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # What another one has not seen to, it never will.
            self._loop, self._room = loop, threading.Semaphore(MAX_BEHIND)
        answer: asyncio.Future[Any] = loop.create_future()

        def reply(result: Any) -> None:
            # Nobody waits on a loop that is closed.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_settle, answer, result)

        self.inbox.put(command(reply))
        # A dead thread answers nobody, so its death must find the futures that wait.
        self._answers.add(answer)
        try:
            return await answer
        finally:
            self._answers.discard(answer)

    def post(self, callback: Callable[..., None], *arguments: object) -> None:
        """From the thread: run a callback on the loop, unless nobody has asked or it is gone."""
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(callback, *arguments)

    def deliver(self, callback: Callable[..., None], *arguments: object) -> None:
        """``post`` once the loop is not far behind with what was delivered before."""
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
        """The loop is about to wait for the thread: let nothing more wait for the loop."""
        self._is_paced = False
        self._room.release()

    def clear(self) -> None:
        """From the thread: forget the commands that it will not carry out."""
        while not self.inbox.empty():
            self.inbox.get()

    def fail(self, error: EngineDeadError) -> None:
        """Answer everybody who waits."""
        for answer in self._answers:
            _settle(answer, error)


def _settle(answer: asyncio.Future[Any], result: Any) -> None:
    if not answer.done():
        answer.set_result(result)
