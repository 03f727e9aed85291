"""The clients of the swap test: streams, rollouts, and requests to an idle server."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from benchmarks.servers import SERVED_NAME
from loadtests.swap_samples import Output, Sample, Span

POLICIES = ("left", "right")
STREAM_TOKENS, ROLLOUT_TOKENS, GROUP = 48, 24, 2
# SHARED: common prefixes, longer and shorter than a block, so that wrong reuse of KV would show.
SHARED = [7 + number * 13 % 900 for number in range(48)]
PROMPTS = {
    "short": SHARED[:9],
    "block": SHARED[:32],
    "long": SHARED,
    "longer": [*SHARED, *range(300, 340)],
}
STREAMED = tuple(PROMPTS)
ROLLED = ("block", "longer")
SEED = 11


class RefusedError(Exception):
    """A request failed that should not."""


@dataclass(slots=True)
class Policy:
    """An adapter's versions: the newest that serves, and the newest that was sent.

    Attributes:
        seeds: seeds of the tensors, by version.
    """

    name: str
    live: int = 0
    sent: int = 0
    seeds: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Clients:
    """Clients that send requests until they are stopped, and keep the answers."""

    http: httpx2.AsyncClient
    policies: dict[str, Policy]
    samples: list[Sample] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    is_stopped: bool = False

    async def run(self, streams: int) -> None:
        """Run streams of each policy and of the base model, and one rollout of each policy."""
        policies: list[Policy | None] = [*self.policies.values(), None]
        async with asyncio.TaskGroup() as tasks:
            for policy, number in itertools.product(policies, range(streams)):
                tasks.create_task(self._stream(policy, number))
            for policy in self.policies.values():
                tasks.create_task(self._roll(policy))

    async def _stream(self, policy: Policy | None, number: int) -> None:
        """Send greedy requests, one prompt after the other."""
        cases = itertools.cycle(STREAMED[number % len(STREAMED) :] + STREAMED)
        while not self.is_stopped:
            case, before = next(cases), policy.live if policy else 0
            try:
                output = await stream(self.http, model_of(policy), case)
            except (RefusedError, httpx2.HTTPError, ValueError, KeyError) as cause:
                self.failures.append(f"stream {case}: {cause!r}")
                continue
            self._keep(policy, case, 0, before, output)

    async def _roll(self, policy: Policy) -> None:
        """Send rollouts that are sampled with seeds."""
        while not self.is_stopped:
            before = policy.live
            try:
                outputs = await roll(self.http, model_of(policy))
            except (RefusedError, httpx2.HTTPError, ValueError, KeyError) as cause:
                self.failures.append(f"rollout: {cause!r}")
                continue
            for (case, index), output in outputs.items():
                self._keep(policy, case, index, before, output)

    def _keep(
        self, policy: Policy | None, case: str, index: int, before: int, output: Output
    ) -> None:
        sample = Sample(
            policy=policy.name if policy else None,
            case=case,
            index=index,
            output=output,
            newest_before=before,
            newest_after=policy.sent if policy else 0,
        )
        self.samples.append(sample)


def model_of(policy: Policy | None) -> str:
    """Return the name of a policy's model in requests."""
    return f"{SERVED_NAME}:{policy.name}" if policy else SERVED_NAME


async def stream(http: httpx2.AsyncClient, model: str, case: str) -> Output:
    """Return the output of a greedy, streamed completion.

    Raises:
        RefusedError: the status is no 200, an event is an error, or the stream breaks off.
    """
    body = {
        "model": model,
        "prompt": PROMPTS[case],
        "max_tokens": STREAM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
        "stream": True,
        "return_token_ids": True,
        "return_weight_versions": True,
    }
    ids, logprobs, spans, is_done = [], [], [], False
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RefusedError(f"status {response.status_code}: {await response.aread()!r}")
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if data == "[DONE]":
                is_done = True
            if data == line or is_done:
                continue
            event = json.loads(data)
            if "error" in event:
                raise RefusedError(data)
            for choice in event["choices"]:
                ids += choice.get("token_ids") or []
                logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
                spans += _spans(choice.get("weight_versions") or [])
    if not is_done or len(ids) != STREAM_TOKENS:
        raise RefusedError(f"the stream ended after {len(ids)} tokens")
    return Output(ids, logprobs, spans)


async def roll(
    http: httpx2.AsyncClient, model: str, **fields: Any
) -> dict[tuple[str, int], Output]:
    """Return the samples of a rollout by prompt and index in the group.

    Raises:
        RefusedError: the status is no 200, or a sample is missing.
    """
    names = ROLLED if "cases" not in fields else fields.pop("cases")
    body = {
        "model": model,
        "prompts": [PROMPTS[name] for name in names],
        "n": GROUP,
        "max_tokens": ROLLOUT_TOKENS,
        "temperature": 1.0,
        "seeds": [SEED + GROUP * number for number in range(len(names))],
        "ignore_eos": True,
    }
    body |= fields
    response = await http.post("/v1/rl/rollout", json=body)
    if response.status_code != 200:
        raise RefusedError(f"status {response.status_code}: {response.text[:300]}")
    groups = response.json()["groups"]
    outputs = {
        (names[group["index"]], sample["index"]): Output(
            sample["token_ids"], sample["logprobs"], _spans(sample["weight_versions"])
        )
        for group in groups
        for sample in group["samples"]
    }
    if len(outputs) != len(names) * body["n"]:
        raise RefusedError(f"of {len(names) * body['n']} samples {len(outputs)} came")
    return outputs


#: ``Fresh``: outputs by (is a stream's, case, index in the group).
Fresh = dict[tuple[bool, str, int], Output]


async def fresh_outputs(http: httpx2.AsyncClient, model: str, salt: str) -> Fresh:
    """Return the outputs of each case on an idle server; ``salt`` prevents KV reuse."""
    streams = await roll(
        http,
        model,
        cases=STREAMED,
        n=1,
        seeds=[0] * len(STREAMED),
        temperature=0,
        max_tokens=STREAM_TOKENS,
        cache_salt=salt,
    )
    samples = await roll(http, model, cache_salt=salt)
    return {(True, *key): output for key, output in streams.items()} | {
        (False, *key): output for key, output in samples.items()
    }


def _spans(spans: Sequence[dict[str, Any]]) -> list[Span]:
    return [Span(span["version"], span["start"], span["end"]) for span in spans]
