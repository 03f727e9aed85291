"""Commands from an event loop to the engine thread, what comes back, and the open streams."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mlx_parallm.engine.commands import Command
from mlx_parallm.types.errors import InvalidRequestError, ParallmError, RequestAbortedError
from mlx_parallm.types.events import ErrorEvent
from mlx_parallm.types.work import Event, EventReader, Request


@dataclass(frozen=True, slots=True)
class _Open:
    request: Request
    reader: EventReader
    on_close: Callable[[], None]


class OpenStreams:
    """Finds the reader of each event. Lives on the event loop.

    Attributes:
        idle: set while no request is open or enters.
    """

    def __init__(self) -> None:
        self._streams: dict[str, _Open] = {}
        self._num_entering = 0
        self.idle = asyncio.Event()
        self.idle.set()
        #: Samples of all requests; those that have ended count until their request has.
        self.num_samples = 0

    def __len__(self) -> int:
        """Return how many requests are open."""
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        """True if a request is open."""
        return request_id in self._streams

    def ids(self) -> Sequence[str]:
        """Return the ids of all requests, oldest first."""
        return list(self._streams)

    def requests(self) -> Sequence[Request]:
        """Return all requests."""
        return [stream.request for stream in self._streams.values()]

    def enter(self) -> None:
        """Count a request that waits for its model or adapter, until ``leave``."""
        self._num_entering += 1
        self.idle.clear()

    def leave(self) -> None:
        """Count a request no more that was opened, or refused."""
        self._num_entering -= 1
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._streams and not self._num_entering:
            self.idle.set()

    def open(
        self, request: Request, reader: EventReader, on_close: Callable[[], None] = lambda: None
    ) -> None:
        """Send a request's events to a reader from now on.

        ``on_close`` is called once the request has ended.

        Raises:
            InvalidRequestError: its id is that of another open request.
        """
        request_id = request.request_id
        if request_id in self._streams:
            raise InvalidRequestError(
                f"Request id {request_id!r} is already in use.", param="request_id"
            )
        self._streams[request_id] = _Open(request, reader, on_close)
        self.idle.clear()
        self.num_samples += reader.num_samples

    def close(self, request_id: str) -> bool:
        """Forget a stream; False if it was not open."""
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return False
        self.num_samples -= stream.reader.num_samples
        stream.on_close()
        self._note_idle()
        return True

    def dispatch(self, events: Sequence[Event]) -> Sequence[str]:
        """Hand events to their readers; return the requests that end because theirs do not read."""
        unread: list[str] = []
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            stream.reader.put(event)
            if stream.reader.is_complete:
                self.close(event.request_id)
            elif stream.reader.is_overfull:
                stream.reader.fail(RequestAbortedError("The client does not read its stream."))
                self.close(event.request_id)
                unread.append(event.request_id)
        return unread

    def fail(self, request_id: str, reader: EventReader, error: ParallmError) -> None:
        """End the request of this reader with an error, unless it has ended."""
        stream = self._streams.get(request_id)
        if stream is not None and stream.reader is reader:
            reader.fail(error)
            self.close(request_id)

    def end_all(self, error: ParallmError) -> None:
        """End every request with this error."""
        for request_id, stream in list(self._streams.items()):
            stream.reader.put(ErrorEvent(request_id=request_id, error=error))
            self.close(request_id)


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
        loop = self._enter()
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

    def submit(
        self,
        command: Callable[[Callable[[ParallmError | None], None]], Command],
        refuse: Callable[[ParallmError], None],
    ) -> None:
        """Send a command whose success is seen by its events; ``refuse`` gets a refusal.

        The loop is not woken for the reply of what is admitted.
        """
        self._enter()

        def reply(refusal: ParallmError | None) -> None:
            if refusal is not None:
                self.post(refuse, refusal)

        self.send(command(reply))

    def _enter(self) -> asyncio.AbstractEventLoop:
        """Return the running loop, which gets what is posted from now on."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # Another loop will never handle the events that it has not handled yet.
            self._loop, self._room = loop, threading.Semaphore(MAX_BEHIND)
        return loop

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
