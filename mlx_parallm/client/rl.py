"""The client of an RL loop: rollouts, scores, adapters, pauses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, Unpack

from mlx_parallm.client.errors import RequestFailedError, ServerUnreachableError, failure_in
from mlx_parallm.client.results import (
    Prompt,
    Rollout,
    Sample,
    expected,
    prompt_of,
    rollout_of,
    sample_of,
)
from mlx_parallm.client.transport import Transport

#: A text, token ids, a conversation, or an object with one of them and what belongs to it alone.
PromptInput = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]


class RolloutOptions(TypedDict, total=False):
    """Further fields of ``POST /v1/rl/rollout``; docs/api.md describes them."""

    model: str
    adapter: str
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[str, float]
    allowed_token_ids: Sequence[int]
    seed: int
    seeds: Sequence[int]
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    min_tokens: int
    ignore_eos: bool
    structured_outputs: Mapping[str, Any]
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"]
    top_logprobs: int
    entropy: bool
    prompt_logprobs: int
    timeout_s: float
    verifier: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]]
    chat_template_kwargs: Mapping[str, Any]
    priority: int
    cache_salt: str


class RLClient:
    """Speaks to one server.

    Example:
        >>> async with RLClient("http://127.0.0.1:8000") as client:
        ...     rollout = await client.rollout(["1, 2, 3,"], n=4, max_tokens=8)
        ...     print(rollout.samples[0].token_ids, rollout.samples[0].logprobs)

    Every method raises ``RequestFailedError`` if the server refuses, ``ServerUnreachableError`` if
    there is no answer, and ``UnexpectedAnswerError`` if the answer is of another form.
    """

    def __init__(
        self, base_url: str, *, api_key: str | None = None, timeout_s: float | None = None
    ) -> None:
        """Prepare; nothing is sent yet.

        Args:
            base_url: the server's address, with or without ``/v1``.
            api_key: for adapters, weights and pauses the admin key, if the server has one.
            timeout_s: for an answer, or between two pieces of it; None waits as long as it takes.
        """
        self._transport = Transport(base_url, api_key, timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; rollouts that still run end at the server too."""
        await self._transport.close()

    async def rollout(
        self, prompts: Sequence[PromptInput], *, n: int = 1, **options: Unpack[RolloutOptions]
    ) -> Rollout:
        """Sample ``n`` continuations of each prompt; return once all have ended."""
        body = {"prompts": list(prompts), "n": n, **options}
        return rollout_of(await self._transport.ask("POST", "/v1/rl/rollout", json=body))

    async def stream_rollout(
        self, prompts: Sequence[PromptInput], *, n: int = 1, **options: Unpack[RolloutOptions]
    ) -> AsyncIterator[Sample]:
        """Yield each sample when it has ended, whatever its place.

        Closing the iterator ends the samples that still run.

        Raises:
            RequestFailedError: a prompt failed; raised when the others' samples have come.
        """
        body = {"prompts": list(prompts), "n": n, "stream": True, **options}
        told: dict[int, Prompt] = {}
        failure: RequestFailedError | None = None
        is_complete = False
        async for event in self._transport.events("/v1/rl/rollout", body):
            failure = failure or failure_in(0, event)
            is_complete = event.get("type") == "usage"
            if event.get("type") != "sample":
                continue
            with expected("A sample"):
                number = event["prompt_index"]
                if number not in told:
                    told[number] = prompt_of(event["prompt"])
                sample = sample_of(event, told[number])
            yield sample
        if failure is not None:
            raise failure
        if not is_complete:
            raise ServerUnreachableError("The stream of samples ended before it was complete.")
