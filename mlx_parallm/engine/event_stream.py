"""One request's events, handed from the engine's deliveries to whoever iterates them."""

from __future__ import annotations

import asyncio
from collections import deque

from mlx_parallm.errors import ParallmError
from mlx_parallm.outputs import ErrorEvent, GenerateEvent, TokenEvent
from mlx_parallm.request import GenerateRequest

# Of events that nobody has read: for one sample, and more for each other one.
MAX_UNREAD = 4096
MAX_UNREAD_PER_SAMPLE = 256


class EventStream:
    """An async iterator that ends after the last event of the last sample, or after an error.

    Lives on the event loop; ``put`` must be called there too.

    Attributes:
        request: whose events these are.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self._open_samples = request.params.n
        self._events: deque[GenerateEvent] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._complete = False

    @property
    def is_complete(self) -> bool:
        """Whether the last event has arrived (it may not have been read yet)."""
        return self._complete

    @property
    def is_overfull(self) -> bool:
        """Whether its reader is so far behind that the request should end."""
        most = MAX_UNREAD + MAX_UNREAD_PER_SAMPLE * self.request.params.n
        return len(self._events) > most

    def fail(self, error: ParallmError) -> None:
        """End with an error, dropping what has not been read."""
        self._events.clear()
        self.put(ErrorEvent(request_id=self.request.request_id, error=error))

    def put(self, event: GenerateEvent) -> None:
        """Append an event; events after the last are dropped."""
        if self._complete:
            return
        match event:
            case TokenEvent(finish_reason=reason) if reason is not None:
                self._open_samples -= 1
                self._complete = self._open_samples == 0
            case ErrorEvent():
                self._complete = True
            case _:
                pass
        self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> GenerateEvent:
        while not self._events:
            if self._complete:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._events.popleft()
