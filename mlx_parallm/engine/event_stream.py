"""One request's events, handed from the engine's deliveries to whoever iterates them."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from itertools import chain
from typing import cast

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
        # Unread events that wake the reader.
        self._together = 1
        self._is_begun = False
        self._may_be_read = False

    def gather(self, count: int) -> None:
        """From now on wake the reader for ``count`` tokens of each sample, given as one event.

        What begins and what ends a sample or the request is not kept waiting. No more are gathered
        than may be unread.
        """
        most = min(count, MAX_UNREAD_PER_SAMPLE)
        self._together = most * self.request.params.n if count > 1 else 1

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
        self._may_be_read = self._may_be_read or self._is_due(event)
        if self._may_be_read and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _is_due(self, event: GenerateEvent) -> bool:
        """Whether there is something to read with this event."""
        if not isinstance(event, TokenEvent) or event.finish_reason is not None:
            return True
        return not self._is_begun or len(self._events) >= self._together

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> GenerateEvent:
        while not self._may_be_read:
            if self._complete:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        event = self._events.popleft()
        if isinstance(event, TokenEvent):
            self._is_begun = True
            event = self._joined(event) if self._together > 1 else event
        self._may_be_read = bool(self._events)
        return event

    def _joined(self, first: TokenEvent) -> TokenEvent:
        """An event, and those of its sample that have come right behind it."""
        parts = [first]
        while self._events and _goes_on(parts[-1], self._events[0]):
            parts.append(cast("TokenEvent", self._events.popleft()))
        if len(parts) == 1:
            return first
        return replace(
            parts[-1],
            token_ids=tuple(chain.from_iterable(one.token_ids for one in parts)),
            text="".join(one.text for one in parts),
            pieces=tuple(parts),
            logprobs=tuple(chain.from_iterable(one.logprobs for one in parts)),
        )


def _goes_on(event: TokenEvent, later: GenerateEvent) -> bool:
    """Whether an event brings more of the same sample, by the same weights."""
    return (
        isinstance(later, TokenEvent)
        and event.finish_reason is None
        and (event.index, event.version) == (later.index, later.version)
    )
