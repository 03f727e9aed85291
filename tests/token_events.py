"""Events of requests, known to be tokens."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator

from mlx_parallm.types.events import GenerateEvent, TokenEvent


def token_event(event: GenerateEvent) -> TokenEvent:
    """Return the event, which must be one of tokens."""
    assert isinstance(event, TokenEvent)
    return event


async def token_events(stream: AsyncIterable[GenerateEvent]) -> AsyncIterator[TokenEvent]:
    """Yield the events of a stream, all of which must be of tokens."""
    async for event in stream:
        yield token_event(event)
