"""One request's events, in order, with an end."""

from __future__ import annotations

import asyncio

import pytest

from mlx_parallm.engine.event_stream import MAX_UNREAD, MAX_UNREAD_PER_SAMPLE, EventStream
from mlx_parallm.errors import StepError
from mlx_parallm.outputs import ErrorEvent, FinishReason, TokenEvent
from mlx_parallm.request import GenerateRequest, SamplingParams


def request(n: int) -> GenerateRequest:
    return GenerateRequest(request_id="a", model="m", prompt_ids=(1,), params=SamplingParams(n=n))


def token(index: int, *, last: bool = False) -> TokenEvent:
    reason = FinishReason.STOP if last else None
    return TokenEvent(request_id="a", index=index, token_ids=(1,), text="x", finish_reason=reason)


async def test_iteration_ends_when_every_sample_has_ended() -> None:
    stream = EventStream(request(2))
    for event in (token(0, last=True), token(1), token(1, last=True), token(1)):
        stream.put(event)
    assert len([event async for event in stream]) == 3
    assert stream.is_complete


async def test_a_waiting_reader_is_woken() -> None:
    stream = EventStream(request(1))
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    stream.put(token(0))
    assert (await reader).text == "x"


async def test_an_error_is_the_last_event() -> None:
    stream = EventStream(request(3))
    stream.put(ErrorEvent(request_id="a", error=StepError("no")))
    stream.put(token(0))
    assert [type(event) async for event in stream] == [ErrorEvent]


@pytest.mark.parametrize("n", [1, 3])
async def test_what_nobody_reads_is_bounded_and_dropped_at_the_end(n: int) -> None:
    stream = EventStream(request(n))
    most = MAX_UNREAD + MAX_UNREAD_PER_SAMPLE * n
    for _ in range(most):
        stream.put(token(0))
    assert not stream.is_overfull
    stream.put(token(0))
    assert stream.is_overfull
    stream.fail(StepError("no"))
    assert [type(event) async for event in stream] == [ErrorEvent]
