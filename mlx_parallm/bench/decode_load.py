"""Requests that decode without end in an engine that the caller steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.types.errors import ConfigError
from mlx_parallm.types.events import ErrorEvent, TokenEvent
from mlx_parallm.types.request import GenerateRequest, SamplingParams


class DecodeLoad:
    """Requests of an engine that decode until ``end``; the engine may have other requests too.

    Times are in milliseconds, one for each step.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        prompts: Sequence[Sequence[int]],
        params_of: Sequence[Mapping[str, Any]] | None = None,
        name: str = "bench",
        **params: Any,
    ) -> None:
        """Add the requests.

        Args:
            engine: the engine.
            prompts: token ids, one list for each request.
            params_of: sampling parameters of each request; None: ``params`` alone.
            name: the prefix of the request ids.
            **params: sampling parameters of all requests; greedy by default.
        """
        shared: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, **params}
        own = [dict[str, Any](request_params) for request_params in params_of or ()]
        own = own or [{}] * len(prompts)
        self._engine = engine
        self._ids = [f"{name}-{i}" for i in range(len(prompts))]
        self._mine = frozenset(self._ids)
        self._waiting = set(self._ids)
        #: The number of tokens of all prompts and of all decoded tokens.
        self.num_tokens = sum(map(len, prompts))
        for request_id, prompt, own_params in zip(self._ids, prompts, own, strict=True):
            engine.submit(
                GenerateRequest(
                    request_id=request_id,
                    model="bench",
                    prompt_ids=tuple(prompt),
                    params=SamplingParams(**shared | own_params),
                )
            )

    def step(self) -> tuple[float, int]:
        """Return the milliseconds of one step, and the number of tokens for these requests.

        Raises:
            ConfigError: the engine has nothing to run.
            StepError: a request failed.
        """
        started = time.perf_counter()
        events = self._engine.step()
        elapsed = time.perf_counter() - started
        if events is None:
            raise ConfigError("no request could run: the requests do not fit the KV memory.")
        count = 0
        for event in events:
            if isinstance(event, ErrorEvent):
                raise event.error
            if isinstance(event, TokenEvent) and event.request_id in self._mine:
                self._waiting.discard(event.request_id)
                count += len(event.token_ids)
        self.num_tokens += count
        return elapsed * 1e3, count

    def prefill(self) -> list[float]:
        """Step until every request has a token; return the times."""
        times: list[float] = []
        while self._waiting:
            times.append(self.step()[0])
        return times

    def decode(self, steps: int) -> list[float]:
        """Return the times of ``steps`` steps in which every request decodes one token.

        Raises:
            ConfigError: not all requests ran in every step.
        """
        results = [self.step() for _ in range(steps)]
        tokens = sum(count for _, count in results)
        if tokens != steps * len(self._ids):
            raise ConfigError(
                f"{len(self._ids)} requests made {tokens} tokens in {steps} steps: "
                "they do not all fit the KV memory at once."
            )
        return [elapsed for elapsed, _ in results]

    def end(self) -> None:
        """Abort the requests and let the step in flight end."""
        for request_id in self._ids:
            self._engine.abort(request_id)
        # At most one step is in flight; other requests may continue.
        if self._engine.has_work():
            self._engine.step()
