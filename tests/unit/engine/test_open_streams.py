"""The streams of requests that have not ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlx_parallm.engine.mailbox import OpenStreams
from mlx_parallm.generation.event_stream import MAX_UNREAD, EventStream
from mlx_parallm.types.errors import InvalidRequestError, StepError
from mlx_parallm.types.events import ErrorEvent, FinishReason, GenerateEvent, TokenEvent
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from tests.token_events import token_events

REQUEST = GenerateRequest(request_id="a", model="m", prompt_ids=(1,), params=SamplingParams())
OTHER = replace(REQUEST, request_id="b")


def token(request_id: str, *, last: bool = False) -> TokenEvent:
    reason = FinishReason.STOP if last else None
    return TokenEvent(
        request_id=request_id, index=0, token_ids=(1,), text="x", finish_reason=reason
    )


@pytest.fixture
def streams() -> OpenStreams:
    return OpenStreams()


def opened(streams: OpenStreams, request: GenerateRequest) -> EventStream:
    stream = EventStream(request)
    streams.open(request, stream)
    return stream


async def test_events_find_their_readers(streams: OpenStreams) -> None:
    first, second = opened(streams, REQUEST), opened(streams, OTHER)
    events: list[GenerateEvent] = [token("a"), token("b", last=True), token("a", last=True)]
    assert streams.dispatch([*events, token("nobody")]) == []
    assert [event.text async for event in token_events(first)] == ["xx"]
    assert len([event async for event in second]) == 1
    assert len(streams) == 0


def test_an_open_id_is_not_given_twice(streams: OpenStreams) -> None:
    opened(streams, REQUEST)
    with pytest.raises(InvalidRequestError, match="already in use") as refusal:
        opened(streams, REQUEST)
    assert refusal.value.param == "request_id"
    assert streams.requests() == [REQUEST]
    assert streams.close("a")
    assert not streams.close("a")
    opened(streams, REQUEST)


def test_a_reader_that_does_not_read_is_told_apart(streams: OpenStreams) -> None:
    opened(streams, REQUEST)
    opened(streams, OTHER)
    unread = streams.dispatch([token("a")] * (2 * MAX_UNREAD) + [token("b")])
    assert unread == ["a"]
    assert streams.ids() == ["b"]


async def test_all_end_with_an_error(streams: OpenStreams) -> None:
    stream = opened(streams, REQUEST)
    streams.end_all(StepError("no"))
    assert [type(event) async for event in stream] == [ErrorEvent]
    assert "a" not in streams


def test_samples_of_open_requests_are_counted(streams: OpenStreams) -> None:
    opened(streams, REQUEST)
    opened(streams, replace(OTHER, params=SamplingParams(n=3)))
    assert streams.num_samples == 4
    streams.close("b")
    streams.close("b")
    assert streams.num_samples == 1
    streams.end_all(StepError("no"))
    assert streams.num_samples == 0
