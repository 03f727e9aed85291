"""One request's events, in order, with an end."""

from __future__ import annotations

import asyncio

import pytest

from mlx_parallm.generation.event_stream import MAX_UNREAD, MAX_UNREAD_PER_SAMPLE, EventStream
from mlx_parallm.types.errors import StepError
from mlx_parallm.types.events import ErrorEvent, FinishReason, PromptEvent, TokenEvent
from mlx_parallm.types.request import DEFAULT_VERSION, GenerateRequest, SamplingParams
from mlx_parallm.types.step import TokenLogprob
from tests.token_events import token_event, token_events


def request(n: int) -> GenerateRequest:
    return GenerateRequest(request_id="a", model="m", prompt_ids=(1,), params=SamplingParams(n=n))


def token(index: int, *, last: bool = False) -> TokenEvent:
    reason = FinishReason.STOP if last else None
    return TokenEvent(request_id="a", index=index, token_ids=(1,), text="x", finish_reason=reason)


async def test_iteration_ends_when_every_sample_has_ended() -> None:
    stream = EventStream(request(2))
    for event in (token(0, last=True), token(1), token(1, last=True), token(1)):
        stream.put(event)
    assert [(event.index, event.text) async for event in token_events(stream)] == [
        (0, "x"),
        (1, "xx"),
    ]
    assert stream.is_complete


async def test_a_waiting_reader_is_woken() -> None:
    stream = EventStream(request(1))
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    stream.put(token(0))
    assert token_event(await reader).text == "x"


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


def numbered(number: int, *, index: int = 0, version: str = DEFAULT_VERSION) -> TokenEvent:
    return TokenEvent(
        request_id="a",
        index=index,
        token_ids=(number,),
        text=str(number),
        logprobs=(logprob(number),),
        version=version,
    )


def logprob(number: int) -> TokenLogprob:
    return TokenLogprob(token_id=number, logprob=-float(number), rank=1, top=())


async def test_tokens_come_together_but_for_the_first_and_the_last() -> None:
    stream, seen = EventStream(request(1)), []
    stream.gather(3)

    async def read() -> None:
        async for event in stream:
            seen.append(event)

    reader = asyncio.ensure_future(read())
    for number in range(9):
        stream.put(numbered(number))
        for _ in range(3):
            await asyncio.sleep(0)
    assert [event.text for event in seen] == ["0", "123", "456"]
    assert [event.token_ids for event in seen] == [(0,), (1, 2, 3), (4, 5, 6)]
    assert [len(event.logprobs) for event in seen] == [1, 3, 3]
    assert seen[1].pieces == (numbered(1), numbered(2), numbered(3))
    stream.put(token(0, last=True))
    await reader
    assert [event.text for event in seen[3:]] == ["78x"]
    assert seen[-1].finish_reason is FinishReason.STOP


async def test_samples_and_versions_of_weights_are_not_joined() -> None:
    stream = EventStream(request(2))
    stream.gather(4)
    events = [
        numbered(1),
        numbered(2),
        numbered(3, index=1),
        numbered(4, index=1, version="2"),
        numbered(5, index=1, version="2"),
        token(1, last=True),
        token(0, last=True),
    ]
    for event in events:
        stream.put(event)
    seen = [event async for event in token_events(stream)]
    assert [(event.index, event.text, event.version) for event in seen] == [
        (0, "12x", DEFAULT_VERSION),
        (1, "3", DEFAULT_VERSION),
        (1, "45", "2"),
        (1, "x", DEFAULT_VERSION),
    ]
    assert [event.finish_reason for event in seen] == [
        FinishReason.STOP,
        None,
        None,
        FinishReason.STOP,
    ]


@pytest.mark.parametrize("together", [1, 5])
async def test_an_error_and_a_prompt_are_told_at_once(together: int) -> None:
    stream = EventStream(request(3))
    stream.gather(together)
    for event in (PromptEvent(request_id="a", num_cached_tokens=0), numbered(1)):
        stream.put(event)
        assert await anext(stream) == event
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    stream.fail(StepError("broke"))
    assert isinstance(await waiting, ErrorEvent)


async def test_each_event_comes_at_once_unless_asked_otherwise() -> None:
    stream = EventStream(request(8))
    for number in range(4):
        stream.put(numbered(number))
        assert await anext(stream) == numbered(number)


async def test_a_reader_that_is_behind_gets_what_came_meanwhile_together() -> None:
    stream = EventStream(request(2))
    for number in range(6):
        stream.put(numbered(number, index=number % 2))
    first = await anext(stream)
    assert isinstance(first, TokenEvent)
    assert (first.index, first.token_ids, len(first.logprobs)) == (0, (0, 2, 4), 3)
    # Tokens that come before the other sample is read are joined to those that came earlier.
    stream.put(numbered(7, index=1))
    stream.put(numbered(6))
    second = await anext(stream)
    assert isinstance(second, TokenEvent)
    assert (second.index, second.token_ids) == (1, (1, 3, 5, 7))
    assert second.pieces == tuple(numbered(number, index=1) for number in (1, 3, 5, 7))
    assert await anext(stream) == numbered(6)


async def test_joined_tokens_count_as_unread_until_they_are_read() -> None:
    stream = EventStream(request(2))
    most = MAX_UNREAD + MAX_UNREAD_PER_SAMPLE * 2
    for number in range(most):
        stream.put(numbered(number, index=1))
        if number == 0:
            stream.put(numbered(0))
    assert stream.is_overfull
    assert len(token_event(await anext(stream)).token_ids) == most
    for number in range(most - 1):
        stream.put(numbered(number))
    assert not stream.is_overfull
    await anext(stream)
    stream.put(numbered(0))
    assert not stream.is_overfull


async def test_no_more_is_gathered_than_may_be_unread() -> None:
    stream = EventStream(request(2))
    stream.gather(10**6)
    stream.put(numbered(0))
    await anext(stream)
    waiting = asyncio.ensure_future(anext(stream))
    for number in range(2 * MAX_UNREAD_PER_SAMPLE):
        await asyncio.sleep(0)
        assert not waiting.done()
        stream.put(numbered(number))
        assert not stream.is_overfull
    assert len(token_event(await waiting).token_ids) == 2 * MAX_UNREAD_PER_SAMPLE


def test_events_can_be_kept_in_sets() -> None:
    assert len({numbered(1), numbered(1), numbered(2)}) == 2
