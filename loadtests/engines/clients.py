"""Clients of the test, which note how every answer ends."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import httpx2

from loadtests.swap_clients import PROMPTS, STREAMED, Policy
from loadtests.swap_samples import Output, Sample, Span

#: ``TOKENS`` of a stream: it takes long enough to be hit by deaths.
TOKENS = 96


class End(StrEnum):
    """End of an answer.

    complete: with all its tokens.
    error: with an error event.
    refused: with another status than 200.
    broken: the connection broke.
    silent: the stream ended in order, without an error and without all its tokens.
    """

    COMPLETE = "complete"
    ERROR = "error"
    REFUSED = "refused"
    BROKEN = "broken"
    SILENT = "silent"


@dataclass(slots=True)
class Answer:
    """A streamed answer.

    Attributes:
        begin_s, end_s: readings of ``time.perf_counter``.
        sample: its tokens, if it is complete.
        num_tokens: how many tokens came.
        why: what the server said of an error.
    """

    begin_s: float
    end: End = End.SILENT
    end_s: float = 0.0
    sample: Sample | None = None
    num_tokens: int = 0
    why: str = ""


@dataclass(slots=True)
class Clients:
    """Clients that stream until they are stopped, and keep the answers."""

    base_url: str
    answers: list[Answer] = field(default_factory=list)
    is_stopped: bool = False

    async def run(self, policies: list[tuple[Policy, str]], streams: int) -> None:
        """Run streams of each policy, which is served under the name beside it."""
        async with asyncio.TaskGroup() as tasks:
            for (policy, model), number in itertools.product(policies, range(streams)):
                tasks.create_task(self._stream(policy, model, number))

    async def _stream(self, policy: Policy, model: str, number: int) -> None:
        cases = itertools.cycle(STREAMED[number % len(STREAMED) :] + STREAMED)
        while not self.is_stopped:
            # Each client has a connection of its own, which the death of a process may break.
            async with httpx2.AsyncClient(base_url=self.base_url, timeout=60.0) as http:
                answer = await follow(http, policy, model, next(cases))
            self.answers.append(answer)
            if answer.end is End.REFUSED:
                await asyncio.sleep(0.05)


async def follow(http: httpx2.AsyncClient, policy: Policy, model: str, case: str) -> Answer:
    """Stream a greedy completion to its end, whatever that is."""
    answer, before = Answer(time.perf_counter()), policy.live
    output = Output([], [], [])
    try:
        await _read(http, model, case, output, answer)
    except httpx2.TransportError as cause:
        answer.end, answer.why = End.BROKEN, repr(cause)
    answer.end_s, answer.num_tokens = time.perf_counter(), len(output.token_ids)
    answer.sample = Sample(
        policy=policy.name,
        case=case,
        index=0,
        output=output,
        newest_before=before,
        newest_after=policy.sent,
    )
    return answer


async def _read(
    http: httpx2.AsyncClient, model: str, case: str, output: Output, answer: Answer
) -> None:
    """Read a stream into ``output``, and its end into ``answer``."""
    body = {
        "model": model,
        "prompt": PROMPTS[case],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "stream": True,
        "return_token_ids": True,
        "return_weight_versions": True,
    }
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            answer.end, answer.why = End.REFUSED, str(await response.aread())[:200]
            return
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if data == "[DONE]" and len(output.token_ids) == TOKENS:
                answer.end = End.COMPLETE
            elif data != line and data != "[DONE]":
                _take(json.loads(data), output, answer)


def _take(event: dict[str, Any], output: Output, answer: Answer) -> None:
    """Add the tokens of an event to the output, or note its error."""
    if "error" in event:
        answer.end, answer.why = End.ERROR, str(event["error"])[:200]
        return
    ids: Any = output.token_ids
    logprobs: Any = output.logprobs
    spans: Any = output.spans
    for choice in event["choices"]:
        ids += choice.get("token_ids") or []
        logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
        for span in choice.get("weight_versions") or []:
            spans.append(Span(span["version"], span["start"], span["end"]))
