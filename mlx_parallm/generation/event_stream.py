"""One request's events, handed from the engine's deliveries to their reader."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from itertools import chain
from typing import cast

from mlx_parallm.types.errors import ParallmError
from mlx_parallm.types.events import ErrorEvent, GenerateEvent, TokenEvent
from mlx_parallm.types.request import GenerateRequest

# MAX_UNREAD bounds the unread events of one sample; each further sample adds to it.
MAX_UNREAD = 4096
MAX_UNREAD_PER_SAMPLE = 256


class EventStream:
    """An async iterator that ends after the last event of the last sample, or after an error.

    A reader that falls behind gets the tokens of a sample that came meanwhile as one event, so that
    it catches up. Lives on the event loop; ``put`` must be called there too.

    Attributes:
        request: whose events these are.
        num_samples: see ``EventReader``.
        has_one_event: False.
        is_complete: True if the last event has arrived (it may not have been read yet).
    """

    has_one_event = False

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.num_samples = self._open_samples = request.params.n
        self._events: deque[GenerateEvent] = deque()
        # Events in ``_events`` as they came, and whether any came since they were joined.
        self._num_unread = 0
        self._is_joined = True
        self._waiter: asyncio.Future[None] | None = None
        self.is_complete = False
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
        self._together = most * self.num_samples if count > 1 else 1

    @property
    def is_overfull(self) -> bool:
        """Return True if its reader is so far behind that the request should end."""
        most = MAX_UNREAD + MAX_UNREAD_PER_SAMPLE * self.num_samples
        return self._num_unread > most

    def fail(self, error: ParallmError) -> None:
        """End with an error, dropping what has not been read."""
        self._events.clear()
        self._num_unread = 0
        self.put(ErrorEvent(request_id=self.request.request_id, error=error))

    def put(self, event: GenerateEvent) -> None:
        """Append an event; events after the last are dropped."""
        if self.is_complete:
            return
        match event:
            case TokenEvent(finish_reason=reason) if reason is not None:
                self._open_samples -= 1
                self.is_complete = self._open_samples == 0
            case ErrorEvent():
                self.is_complete = True
            case _:
                pass
        self._events.append(event)
        self._num_unread += 1
        self._is_joined = False
        self._may_be_read = self._may_be_read or self._is_due(event)
        if self._may_be_read and self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _is_due(self, event: GenerateEvent) -> bool:
        """Return True if there is something to read with this event."""
        if not isinstance(event, TokenEvent) or event.finish_reason is not None:
            return True
        return not self._is_begun or self._num_unread >= self._together

    def __aiter__(self) -> EventStream:
        return self

    async def __anext__(self) -> GenerateEvent:
        while not self._may_be_read:
            if self.is_complete:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if not self._is_joined:
            self._events, self._is_joined = _joined(self._events), True
        event = self._events.popleft()
        self._may_be_read = bool(self._events)
        if isinstance(event, TokenEvent):
            self._is_begun = True
            self._num_unread -= len(event.pieces or (event,))
        else:
            self._num_unread -= 1
        return event


def _joined(events: deque[GenerateEvent]) -> deque[GenerateEvent]:
    """Return the same tokens in fewer events, each sample's in their order."""
    if len(events) == 1:
        return events
    groups: list[list[GenerateEvent]] = []
    # The last group of each sample.
    latest: dict[int, list[GenerateEvent]] = {}
    for event in events:
        group = latest.get(event.index) if isinstance(event, TokenEvent) else None
        if group is not None and _goes_on(group[-1], event):
            group.append(event)
            continue
        groups.append([event])
        if isinstance(event, TokenEvent):
            latest[event.index] = groups[-1]
    return deque(_as_one(group) for group in groups)


def _goes_on(event: GenerateEvent, later: GenerateEvent) -> bool:
    """Return True if an event brings more of the same sample, by the same weights."""
    return (
        isinstance(event, TokenEvent)
        and isinstance(later, TokenEvent)
        and event.finish_reason is None
        and (event.index, event.version) == (later.index, later.version)
    )


def _as_one(group: list[GenerateEvent]) -> GenerateEvent:
    if len(group) == 1:
        return group[0]
    parts = cast("list[TokenEvent]", group)
    return replace(
        parts[-1],
        token_ids=tuple(chain.from_iterable(event.token_ids for event in parts)),
        text="".join(event.text for event in parts),
        pieces=tuple(chain.from_iterable(event.pieces or (event,) for event in parts)),
        logprobs=tuple(chain.from_iterable(event.logprobs for event in parts)),
    )
