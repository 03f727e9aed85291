"""The client of an RL loop: rollouts, scores, adapters, pauses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, Unpack
from urllib.parse import quote

from mlx_parallm.client.errors import RequestFailedError, ServerUnreachableError, failure_in
from mlx_parallm.client.results import (
    AdapterInfo,
    Prompt,
    Rollout,
    Sample,
    Score,
    adapter_of,
    expected,
    prompt_of,
    rollout_of,
    sample_of,
    score_of,
)
from mlx_parallm.client.tensors import encode_safetensors, read_folder
from mlx_parallm.client.transport import Transport

_READY_POLL_S = 0.2
#: A text, token ids, a conversation, or an object with one of them and what belongs to it alone.
PromptInput = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]


class RolloutOptions(TypedDict, total=False):
    """Further fields of ``POST /v1/rl/rollout``; docs/rl-api.md describes them."""

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
    reward_model: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]]
    chat_template_kwargs: Mapping[str, Any]
    priority: int
    cache_salt: str
    request_id: str


class ScoreOptions(TypedDict, total=False):
    """Further fields of ``POST /v1/rl/logprobs``; docs/rl-api.md describes them."""

    model: str
    adapter: str
    top_logprobs: int
    entropy: bool
    priority: int
    cache_salt: str
    request_id: str


class RewardOptions(TypedDict, total=False):
    """Further fields of ``POST /v1/rewards/score``; docs/encoders.md describes them."""

    model: str
    sigmoid: bool
    truncate_prompt_tokens: int
    truncation_side: Literal["left", "right"]
    chat_template_kwargs: Mapping[str, Any]


class UploadOptions(TypedDict, total=False):
    """What may be said of an adapter that is uploaded.

    Attributes:
        model: its base model; default: the server's first.
        version: the label of the tokens that it makes; by default the server counts.
        expected_version: the upload is refused unless this version is there.
        pinned: whether the adapter keeps its slot while others come and go.
    """

    model: str | None
    version: str | None
    expected_version: str | None
    pinned: bool | None


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

    async def wait_until_ready(self, timeout_s: float = 120.0) -> None:
        """Return once the server answers; it loads its models before it listens.

        Raises:
            ServerUnreachableError: it does not answer in time.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while True:
            try:
                await self._transport.ask("GET", "/health")
            except ServerUnreachableError:
                if loop.time() >= until_s:
                    raise
                await asyncio.sleep(_READY_POLL_S)
            else:
                return

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

    async def logprobs(
        self,
        items: Sequence[tuple[Sequence[int], Sequence[int]]],
        **options: Unpack[ScoreOptions],
    ) -> list[Score]:
        """How likely completions are: of each token, given all before it.

        Args:
            items: pairs of a prompt and a completion, as token ids.
            **options: further fields of ``POST /v1/rl/logprobs``; docs/rl-api.md describes them.
        """
        pairs = [
            {"prompt_token_ids": list(prompt), "completion_token_ids": list(completion)}
            for prompt, completion in items
        ]
        body = {"items": pairs, **options}
        answer = await self._transport.ask("POST", "/v1/rl/logprobs", json=body)
        with expected("The scores"):
            return [score_of(one) for one in answer["items"]]

    async def rewards(
        self,
        texts: Sequence[str | Sequence[Mapping[str, Any]]],
        **options: Unpack[RewardOptions],
    ) -> list[float]:
        """What a reward model of the server says of texts, or of conversations.

        Args:
            texts: all texts, which are read as they are, or all lists of messages, by the model's
                chat template.
            **options: further fields of ``POST /v1/rewards/score``.
        """
        kind = "texts" if all(isinstance(one, str) for one in texts) else "chats"
        body = {kind: list(texts), **options}
        answer = await self._transport.ask("POST", "/v1/rewards/score", json=body)
        with expected("The rewards"):
            return [one["reward"] for one in answer["data"]]

    async def load_adapter(
        self, name: str, folder: str | Path, **options: Unpack[UploadOptions]
    ) -> AdapterInfo:
        """Upload the adapter that PEFT or mlx-lm wrote into a folder of this machine.

        See ``update_adapter``.

        Raises:
            FileNotFoundError: the folder has no adapter.
        """
        config, data = read_folder(Path(folder))
        return await self._upload(name, data, config, options)

    async def update_adapter(
        self,
        name: str,
        tensors: Mapping[str, Any],
        config: Mapping[str, Any],
        **options: Unpack[UploadOptions],
    ) -> AdapterInfo:
        """Serve an adapter, or replace the one of this name between two steps.

        Requests that run go on with the new weights; their spans show where.

        Args:
            name: requests use it as ``adapter``, or as ``model``.
            tensors: by name, arrays of NumPy or MLX, named as PEFT or mlx-lm name them.
            config: the content of ``adapter_config.json``.
            **options: see ``UploadOptions``.

        Raises:
            RequestFailedError: it does not fit the model, or another version than the expected one
                is there (status 412); what was there goes on serving.
            TypeError: a tensor cannot be written.
        """
        return await self._upload(name, encode_safetensors(tensors), config, options)

    async def adapters(self) -> list[AdapterInfo]:
        """What is loaded."""
        answer = await self._transport.ask("GET", "/v1/adapters")
        with expected("The list of adapters"):
            return [adapter_of(one) for one in answer["data"]]

    async def unload_adapter(self, name: str) -> None:
        """Admit no more requests of an adapter; those that run end with it."""
        await self._transport.ask("DELETE", f"/v1/adapters/{quote(name, safe='/')}")

    async def pause(
        self, mode: Literal["keep", "wait", "abort"] = "keep", *, clear_cache: bool = False
    ) -> int:
        """Have the server generate nothing more.

        Args:
            mode: "keep" leaves requests where they are, and new ones wait with them; "wait" has
                them end first; "abort" ends them with what they have.
            clear_cache: forget cached prefixes. It is never needed after an update: what is cached
                belongs to its weights.

        Returns:
            How many requests are kept, or were aborted.
        """
        query = {"mode": mode, "clear_cache": clear_cache}
        answer = await self._transport.ask("POST", "/pause", params=query)
        with expected("The answer to a pause"):
            return answer["num_requests"]

    async def resume(self) -> None:
        """Have the server go on."""
        await self._transport.ask("POST", "/resume")

    async def is_paused(self) -> bool:
        """Whether the server generates nothing until it is resumed."""
        answer = await self._transport.ask("GET", "/is_paused")
        with expected("The answer"):
            return answer["is_paused"]

    async def sleep(
        self, level: Literal[1, 2] = 1, *, mode: Literal["keep", "wait", "abort"] = "keep"
    ) -> None:
        """Pause the server and have it give memory back, to a trainer on the same machine.

        Args:
            level: 1 is the memory of KV; 2 that of weights too, which are read from their folder
                again.
            mode: see ``pause``; requests that are kept are computed anew.
        """
        await self._transport.ask("POST", "/sleep", params={"level": level, "mode": mode})

    async def wake_up(self) -> None:
        """Have the server take its memory again and go on."""
        await self._transport.ask("POST", "/wake_up")

    async def update_weights(
        self,
        tensors: Mapping[str, Any],
        *,
        model: str | None = None,
        version: str | None = None,
        expected_version: str | None = None,
    ) -> str:
        """Replace some or all weights of a base model between two steps.

        Args:
            tensors: by name, as in the checkpoint; arrays of NumPy or MLX.
            model: which; default: the server's first.
            version: the label of the tokens that they make; by default the server counts.
            expected_version: the update is refused unless this version is there.

        Returns:
            The label.
        """
        options = {"model": model, "version": version, "expected_version": expected_version}
        answer = await self._transport.ask(
            "POST",
            "/update_weights",
            data={key: value for key, value in options.items() if value is not None},
            files={"weights": ("model.safetensors", encode_safetensors(tensors))},
        )
        with expected("The answer to an update"):
            return answer["weight_version"]

    async def weight_version(self) -> str:
        """The label of the first model's weights; for adapters see ``adapters``."""
        answer = await self._transport.ask("GET", "/weight_info")
        with expected("The answer"):
            return answer["weight_version"]

    async def _upload(
        self, name: str, data: bytes, config: Mapping[str, Any], options: UploadOptions
    ) -> AdapterInfo:
        fields: dict[str, str] = {"name": name, "config": json.dumps(config)}
        fields |= {key: _form_text(value) for key, value in options.items() if value is not None}
        answer = await self._transport.ask(
            "POST",
            "/v1/update_adapter_weights",
            data=fields,
            files={"adapter_model": ("adapter_model.safetensors", data)},
        )
        with expected("The answer to an upload"):
            return adapter_of(answer)


def _form_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
