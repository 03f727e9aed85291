"""The first request of a recording may be refused; later ones wait until they are taken."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_parallm.api.audio.hearing import Listener
from mlx_parallm.types.errors import (
    NoRoomError,
    OverloadedError,
    ParallmError,
    PausedError,
    RequestAbortedError,
)
from mlx_parallm.types.events import FinishReason, PromptEvent, TokenEvent
from mlx_parallm.types.model_input import HostArray, audio_of
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.step import TokenLogprob

SOURCE = audio_of(HostArray("float32", (2, 1), bytes(8)), "content")


class Script:
    """A generation of two tokens."""

    def __init__(self, request_id: str, reason: FinishReason) -> None:
        self.is_aborted = False
        self._id, self._reason = request_id, reason

    def gather(self, count: int) -> None:
        """Take what comes one by one."""

    async def abort(self) -> None:
        self.is_aborted = True

    async def events(self) -> AsyncIterator[tuple[int, PromptEvent | TokenEvent]]:
        yield 0, PromptEvent(request_id=self._id, num_cached_tokens=0)
        for token_id, reason in ((5, None), (6, self._reason)):
            logprobs = (TokenLogprob(token_id, -1.0),)
            yield (
                0,
                TokenEvent(
                    request_id=self._id,
                    index=0,
                    token_ids=(token_id,),
                    text="",
                    logprobs=logprobs,
                    finish_reason=reason,
                ),
            )


class Queue:
    """Stands for an admitted request; ``refusal`` comes so many times."""

    def __init__(self, num_full: int, reason: FinishReason = FinishReason.STOP) -> None:
        self.refusal: ParallmError = OverloadedError("full", retry_after_s=0)
        self.prelude = SimpleNamespace(answer_id="id", client="me")
        self.model = SimpleNamespace(names=("hear",))
        self.num_full, self.reason = num_full, reason
        self.requests: list[GenerateRequest] = []
        self.generations: list[Script] = []

    async def start(self, requests: list[GenerateRequest], fields: Any) -> Script:
        del fields
        if self.num_full:
            self.num_full -= 1
            raise self.refusal
        self.requests += requests
        self.generations.append(Script(requests[0].request_id, self.reason))
        return self.generations[-1]


def listener_of(queue: Any) -> Listener:
    return Listener(queue, priority=3)


async def test_requests_of_a_recording_are_of_one_group() -> None:
    queue = Queue(0)
    listener = listener_of(queue)
    for _ in range(2):
        heard = await listener((1, 2), SOURCE, SamplingParams())
        assert (heard.token_ids, heard.num_prompt_tokens) == ((5, 6), 2)
        assert [each.logprob for each in heard.logprobs] == [-1.0, -1.0]
    assert [each.request_id for each in queue.requests] == ["transcript-id-0", "transcript-id-1"]
    assert {each.group for each in queue.requests} == {"transcript-id"}
    assert {(each.priority, each.client) for each in queue.requests} == {(3, "me")}
    assert all(each.is_aborted for each in queue.generations)


@pytest.mark.parametrize(
    "refusal", [OverloadedError("full"), NoRoomError("no memory"), PausedError()]
)
async def test_only_the_first_request_is_refused(
    refusal: OverloadedError | NoRoomError | PausedError,
) -> None:
    refusal.retry_after_s = 0
    queue = Queue(1)
    queue.refusal = refusal
    listener = listener_of(queue)
    with pytest.raises(type(refusal)):
        await listener((1,), SOURCE, SamplingParams())
    queue.num_full = 3
    assert (await listener((1,), SOURCE, SamplingParams())).token_ids == (5, 6)


async def test_a_request_that_is_aborted_ends_the_recording() -> None:
    with pytest.raises(RequestAbortedError):
        await listener_of(Queue(0, FinishReason.ABORT))((1,), SOURCE, SamplingParams())
