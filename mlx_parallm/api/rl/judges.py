"""The judges of samples: a reward model of this server, or a verifier that is asked by HTTP."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import httpx2

from mlx_parallm.api.chat.schema import ChatMessage, turns_of
from mlx_parallm.api.pooling.inputs.encode import Reading
from mlx_parallm.api.pooling.scores.rewards import Text, reward_inputs, reward_model, reward_of
from mlx_parallm.api.rl.groups import Group, Judge, Verdict
from mlx_parallm.api.rl.schema import RewardModel, RolloutItem, Verifier
from mlx_parallm.api.turns.generation import named_by
from mlx_parallm.api.turns.history import template_messages
from mlx_parallm.generation.model import Tokenizer
from mlx_parallm.pooling.client import PoolingClient
from mlx_parallm.types.errors import InvalidRequestError, ParallmError
from mlx_parallm.types.json_values import is_object

_FIELDS = {"model": "reward_model", "messages": "prompts"}
MAX_ANSWER_BYTES = 64 * 1024
# Calls of one rollout that wait for their answers at the same time.
MAX_CALLS = 32


class RewardScorer(Judge):
    """Reads samples with what they continue."""

    def __init__(
        self,
        client: PoolingClient,
        settings: RewardModel,
        items: Sequence[RolloutItem],
        tokenizer: Tokenizer,
        *,
        rollout_id: str,
    ) -> None:
        """Check what can be checked before anything is sampled.

        Args:
            client: where the model is.
            settings: which model, and how it reads.
            items: the prompts.
            tokenizer: of the model that samples: prompts of token ids are read as its text.
            rollout_id: begins the ids of the work.

        Raises:
            InvalidRequestError: there is no such model, or it cannot read a prompt.
        """
        self._client = client
        self._settings = settings
        self._tokenizer = tokenizer
        self._id = rollout_id
        with named_by(_FIELDS):
            self._model = reward_model(client, settings.model, "classify")
            self._prompts = [_prompt(item) for item in items]
        longest = self._model.info.max_model_len
        if (settings.truncate_prompt_tokens or 1) not in (-1, *range(1, longest + 1)):
            raise InvalidRequestError(
                f"truncate_prompt_tokens is -1 or from 1 to {longest}.", param="reward_model"
            )
        if self._model.tokenizer.has_chat_template:
            return
        for number, prompt in enumerate(self._prompts):
            if not isinstance(prompt, str | None):
                raise InvalidRequestError(
                    f"prompts[{number}]: {settings.model} has no chat template: give the prompt a "
                    "reward_prompt that is a text.",
                    param="prompts",
                )

    async def judge(self, group: Group, index: int) -> Verdict:
        """Return the reward of a sample, or why there is none."""
        try:
            inputs = await reward_inputs(
                [self._text(group, index)],
                self._model,
                "classify",
                Reading(
                    truncate=self._settings.truncate_prompt_tokens,
                    from_left=self._settings.truncation_side == "left",
                    param="texts",
                ),
                template_kwargs={},
            )
            request_id = f"reward-{self._id}-{group.number}-{index}"
            (logits,) = await self._client.encode(self._model.request(request_id, inputs))
        except ParallmError as problem:
            return Verdict(error=str(problem))
        return Verdict(reward=reward_of(logits, sigmoid=self._settings.sigmoid))

    def _text(self, group: Group, index: int) -> Text:
        prompt, sampled = self._prompts[group.number], group.samples[index].text
        if prompt is None:
            prompt = self._tokenizer.decode(group.request.prompt_ids, skip_special_tokens=True)
        if isinstance(prompt, str):
            return prompt + sampled
        return [*prompt, {"role": "assistant", "content": sampled}]


def _prompt(item: RolloutItem) -> Text | None:
    """Return what comes before the samples; None: the text of the prompt's token ids."""
    prompt = item.reward_prompt or item.text or item.messages
    return _messages(prompt) if isinstance(prompt, list) else prompt


def _messages(messages: Sequence[ChatMessage]) -> Text:
    return template_messages(turns_of(messages))


class VerifierClient(Judge):
    """Posts samples to one URL, as JSON objects, and reads rewards from the answers."""

    def __init__(
        self, verifier: Verifier, write: Callable[[Group, int], Mapping[str, Any]]
    ) -> None:
        """``write`` makes of a sample what the verifier is sent."""
        self._url = verifier.url
        self._timeout_s = verifier.timeout_s
        self._write = write
        self._turns = asyncio.Semaphore(MAX_CALLS)
        # No proxy and no redirect: what is asked is what the operator allowed.
        self._client = httpx2.AsyncClient(timeout=verifier.timeout_s, trust_env=False)

    async def judge(self, group: Group, index: int) -> Verdict:
        """Return the reward of a sample, or why there is none."""
        async with self._turns:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._ask(self._write(group, index))
            except TimeoutError:
                return Verdict(error=f"The verifier took more than {self._timeout_s:g} s.")
            except httpx2.HTTPError as problem:
                return Verdict(error=f"The verifier cannot be asked: {type(problem).__name__}.")

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def _ask(self, sample: Mapping[str, Any]) -> Verdict:
        answer = b""
        async with self._client.stream("POST", self._url, json=sample) as response:
            if response.status_code != 200:
                return Verdict(error=f"The verifier answered {response.status_code}.")
            async for chunk in response.aiter_bytes():
                answer += chunk
                if len(answer) > MAX_ANSWER_BYTES:
                    return Verdict(error=f"The answer has more than {MAX_ANSWER_BYTES} bytes.")
        return read_verdict(answer)


def read_verdict(answer: bytes) -> Verdict:
    """Return the reward in a verifier's answer, ``{"reward": number}``; true is 1, false is 0."""
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        return Verdict(error="The answer is no JSON.")
    reward = value.get("reward") if is_object(value) else None
    # An integer can be too large for a float.
    if not isinstance(reward, int | float) or not -1e300 < reward < 1e300 or math.isnan(reward):
        return Verdict(error="The answer has no reward that is a number.")
    return Verdict(reward=float(reward))


def check_url(url: str, allowed: Collection[str]) -> None:
    """Refuse to ask anybody but those whom the operator named.

    Raises:
        InvalidRequestError: the URL is not one of them, letter by letter.
    """
    if url not in allowed:
        raise InvalidRequestError(
            "This URL is not one of those that the server may ask (--verifier-urls).",
            param="verifier",
        )
