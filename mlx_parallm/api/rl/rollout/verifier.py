"""Asks a verifier by HTTP what a sample is worth."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import httpx2

from mlx_parallm.api.rl.rollout.groups import Group, Judge, Verdict
from mlx_parallm.api.rl.rollout.schema import Verifier
from mlx_parallm.types.errors import InvalidRequestError
from mlx_parallm.types.json_values import is_object

MAX_ANSWER_BYTES = 64 * 1024
# Calls of one rollout that wait for their answers at the same time.
MAX_CALLS = 32


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
