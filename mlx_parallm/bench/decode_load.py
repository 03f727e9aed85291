"""Requests that decode for ever in an engine, stepped by hand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mlx_parallm.engine.engine import Engine
from mlx_parallm.errors import ConfigError
from mlx_parallm.outputs import ErrorEvent, TokenEvent
from mlx_parallm.request import GenerateRequest, SamplingParams

WARMUP_STEPS = 8


class DecodeLoad:
    """A fixed batch of requests; they go on until ``end``."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], **params: Any) -> None:
        asked: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, **params}
        self._engine = engine
        self._ids = [f"bench-{i}" for i in range(len(prompts))]
        for request_id, prompt in zip(self._ids, prompts, strict=True):
            engine.add(
                GenerateRequest(
                    request_id=request_id,
                    model="bench",
                    prompt_ids=tuple(prompt),
                    params=SamplingParams(**asked),
                )
            )

    def prefill(self) -> float:
        """Step until every request has a token; seconds it took.

        Raises:
            StepError: a step failed.
        """
        started = time.perf_counter()
        waiting = set(self._ids)
        while waiting:
            waiting -= {event.request_id for event in self._step()}
        return time.perf_counter() - started

    def decode(self, steps: int) -> float:
        """Milliseconds of a step in which every request decodes one token, after a few others.

        Raises:
            ConfigError: not all requests ran in every step.
            StepError: a step failed.
        """
        for _ in range(WARMUP_STEPS):
            self._step()
        started = time.perf_counter()
        tokens = sum(len(self._step()) for _ in range(steps))
        elapsed = time.perf_counter() - started
        if tokens != steps * len(self._ids):
            raise ConfigError(
                f"{len(self._ids)} requests made {tokens} tokens in {steps} steps: "
                "they do not all fit the KV memory at once."
            )
        return elapsed / steps * 1e3

    def end(self) -> None:
        """Abort every request and let the step in flight end."""
        for request_id in self._ids:
            self._engine.abort(request_id)
        while self._engine.has_work():
            self._engine.step()

    def _step(self) -> list[TokenEvent]:
        events = self._engine.step() or []
        for event in events:
            if isinstance(event, ErrorEvent):
                raise event.error
        return [event for event in events if isinstance(event, TokenEvent)]
