"""The client of an RL loop: rollouts, scores, adapters, pauses."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, Unpack
from urllib.parse import quote

from mlx_parallm.client.errors import RequestFailedError, ServerUnreachableError, failure_in
from mlx_parallm.client.images import ImageInput, image_urls, with_image_urls
from mlx_parallm.client.mezo import MezoClient, TrainingClient
from mlx_parallm.client.nets import NetsClient
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
from mlx_parallm.client.speech import SpeechClient
from mlx_parallm.client.tensors import encode_safetensors, read_folder
from mlx_parallm.client.transport import Transport

_READY_POLL_S = 0.2
#: ``PromptInput``: a text, token ids, a conversation, or an object with one of them and with
#: options of this prompt alone. Images are parts {"type": "image", "image": …} of messages, or
#: ``images`` of the object: each the bytes of a file, a path, a Pillow image or a URL.
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
    top_n_sigma: float
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
    return_values: bool
    prompt_logprobs: int
    timeout_s: float
    verifier: Mapping[str, Any]
    reward_model: Mapping[str, Any]
    tools: Sequence[Mapping[str, Any]]
    chat_template_kwargs: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, int]
    priority: int
    cache_salt: str
    request_id: str


class ScoreOptions(TypedDict, total=False):
    """Further fields of ``POST /v1/rl/logprobs``; docs/rl-api.md describes them."""

    model: str
    adapter: str
    top_logprobs: int
    entropy: bool
    return_values: bool
    mm_processor_kwargs: Mapping[str, int]
    priority: int
    cache_salt: str
    request_id: str


class RewardOptions(TypedDict, total=False):
    """Further fields of ``POST /v1/rewards/score``; docs/pooling.md describes them."""

    model: str
    sigmoid: bool
    truncate_prompt_tokens: int
    truncation_side: Literal["left", "right"]
    chat_template_kwargs: Mapping[str, Any]


class UploadOptions(TypedDict, total=False):
    """Options of an adapter upload.

    Attributes:
        model: its base model; default: the server's first.
        version: the label of its tokens; by default the server counts versions.
        expected_version: the upload is refused unless the current version is this one.
        pinned: True if the adapter must never be evicted from its slot.
    """

    model: str | None
    version: str | None
    expected_version: str | None
    pinned: bool | None


class RLClient:
    """A client of one server.

    Example:
        >>> async with RLClient("http://127.0.0.1:8000") as client:
        ...     rollout = await client.rollout(["1, 2, 3,"], n=4, max_tokens=8)
        ...     print(rollout.samples[0].token_ids, rollout.samples[0].logprobs)

    Every method raises ``RequestFailedError`` if the server refuses, ``ServerUnreachableError`` if
    there is no answer, and ``UnexpectedAnswerError`` if the answer is of another form.

    Attributes:
        mezo: the server's training sessions that learn by forward passes.
        training: those that take gradients.
        nets: the server's nets and policies.
        speech: its speech models.
    """

    def __init__(
        self, base_url: str, *, api_key: str | None = None, timeout_s: float | None = None
    ) -> None:
        """Create a client, without sending anything.

        Args:
            base_url: the server's address, with or without ``/v1``.
            api_key: the API key; adapters, weights and pauses need the admin key, if there is one.
            timeout_s: for an answer, or between two pieces of it; None waits without limit.
        """
        self._transport = Transport(base_url, api_key, timeout_s)
        self.mezo = MezoClient(self._transport)
        self.training = TrainingClient(self._transport)
        self.nets = NetsClient(self._transport)
        self.speech = SpeechClient(self._transport)

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
        """Close the connections; the server aborts rollouts that still run."""
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
        """Sample ``n`` continuations of each prompt; return once all have ended.

        Raises:
            ValueError: an image cannot be read.
        """
        body = {"prompts": [with_image_urls(each) for each in prompts], "n": n, **options}
        return rollout_of(await self._transport.ask("POST", "/v1/rl/rollout", json=body))

    async def stream_rollout(
        self, prompts: Sequence[PromptInput], *, n: int = 1, **options: Unpack[RolloutOptions]
    ) -> AsyncIterator[Sample]:
        """Yield each sample as soon as it has ended, in any order.

        Closing the iterator aborts the samples that still run.

        Raises:
            RequestFailedError: a prompt failed; raised after the samples of the other prompts.
        """
        written = [with_image_urls(each) for each in prompts]
        body = {"prompts": written, "n": n, "stream": True, **options}
        prompts_by_index: dict[int, Prompt] = {}
        failure: RequestFailedError | None = None
        is_complete = False
        async with contextlib.aclosing(self._transport.events("/v1/rl/rollout", body)) as events:
            async for event in events:
                failure = failure or failure_in(0, event)
                is_complete = event.get("type") == "usage"
                if event.get("type") != "sample":
                    continue
                with expected("A sample"):
                    number = event["prompt_index"]
                    if number not in prompts_by_index:
                        prompts_by_index[number] = prompt_of(event["prompt"])
                    sample = sample_of(event, prompts_by_index[number])
                yield sample
        if failure is not None:
            raise failure
        if not is_complete:
            raise ServerUnreachableError("The stream of samples ended before it was complete.")

    async def logprobs(
        self,
        items: Sequence[tuple[Sequence[int], Sequence[int]]],
        *,
        images: Sequence[Sequence[ImageInput]] | None = None,
        **options: Unpack[ScoreOptions],
    ) -> list[Score]:
        """Return the log-probabilities of completions' tokens, each given all before it.

        Args:
            items: pairs of a prompt and a completion, as token ids.
            images: the images of each prompt: bytes of files, paths, Pillow images or URLs.
            **options: further fields of ``POST /v1/rl/logprobs``; docs/rl-api.md describes them.

        Raises:
            ValueError: an image cannot be read, or there are not as many lists as items.
        """
        pairs: list[dict[str, Any]] = [
            {"prompt_token_ids": list(prompt), "completion_token_ids": list(completion)}
            for prompt, completion in items
        ]
        if images is not None:
            for pair, shown in zip(pairs, images, strict=True):
                pair["images"] = image_urls(shown)
        body = {"items": pairs, **options}
        answer = await self._transport.ask("POST", "/v1/rl/logprobs", json=body)
        with expected("The scores"):
            return [score_of(item) for item in answer["items"]]

    async def rewards(
        self,
        texts: Sequence[str | Sequence[Mapping[str, Any]]],
        **options: Unpack[RewardOptions],
    ) -> list[float]:
        """Return a reward model's rewards of texts or conversations.

        Args:
            texts: texts, which are read without a template, or conversations, which the model's
                chat template renders; not both.
            **options: further fields of ``POST /v1/rewards/score``.
        """
        kind = "texts" if all(isinstance(text, str) for text in texts) else "chats"
        body = {kind: list(texts), **options}
        answer = await self._transport.ask("POST", "/v1/rewards/score", json=body)
        with expected("The rewards"):
            return [item["reward"] for item in answer["data"]]

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

        Running requests continue with the new weights; their version spans show where.

        Args:
            name: requests use it as ``adapter``, or as ``model``.
            tensors: by name, arrays of NumPy or MLX, named as PEFT or mlx-lm name them.
            config: the content of ``adapter_config.json``.
            **options: see ``UploadOptions``.

        Raises:
            RequestFailedError: it does not fit the model, or the current version is not the
                expected one (status 412); the old adapter continues to serve.
            TypeError: a tensor cannot be written.
        """
        return await self._upload(name, encode_safetensors(tensors), config, options)

    async def adapters(self) -> list[AdapterInfo]:
        """Return the loaded adapters."""
        answer = await self._transport.ask("GET", "/v1/adapters")
        with expected("The list of adapters"):
            return [adapter_of(item) for item in answer["data"]]

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter: new requests are refused, running ones finish with it."""
        await self._transport.ask("DELETE", f"/v1/adapters/{quote(name, safe='/')}")

    async def pause(
        self, mode: Literal["keep", "wait", "abort"] = "keep", *, clear_cache: bool = False
    ) -> int:
        """Pause generation.

        Args:
            mode: "keep" suspends running requests and queues new ones; "wait" pauses after running
                requests have ended; "abort" ends them with the tokens so far.
            clear_cache: drop cached prefixes. Updates never need it, because cached KV belongs to a
                version of the weights.

        Returns:
            The number of requests that were kept or aborted.
        """
        query = {"mode": mode, "clear_cache": clear_cache}
        answer = await self._transport.ask("POST", "/pause", params=query)
        with expected("The answer to a pause"):
            return answer["num_requests"]

    async def resume(self) -> None:
        """Resume generation after a pause."""
        await self._transport.ask("POST", "/resume")

    async def is_paused(self) -> bool:
        """True if generation is paused."""
        answer = await self._transport.ask("GET", "/is_paused")
        with expected("The answer"):
            return answer["is_paused"]

    async def sleep(
        self, level: Literal[1, 2] = 1, *, mode: Literal["keep", "wait", "abort"] = "keep"
    ) -> None:
        """Pause the server and free its memory, for a trainer on the same machine.

        Args:
            level: 1 frees KV; 2 also frees weights, which ``wake_up`` reads from their folder.
            mode: see ``pause``; the KV of kept requests is computed again.
        """
        await self._transport.ask("POST", "/sleep", params={"level": level, "mode": mode})

    async def wake_up(self) -> None:
        """Allocate the server's memory again and resume generation."""
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
            model: the model's name; default: the server's first.
            version: the label of the new weights' tokens; by default the server counts versions.
            expected_version: the update is refused unless the current version is this one.

        Returns:
            The new version's label.
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
        """Return the label of the first model's weights; for adapters see ``adapters``."""
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
