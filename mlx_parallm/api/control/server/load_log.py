"""A line in the log about the load, every few seconds while there is some."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from mlx_parallm.serving.interface import EngineClient
from mlx_parallm.types.errors import ParallmError

logger = logging.getLogger(__name__)

# INTERVAL_S: as often as vLLM logs its load.
INTERVAL_S = 10.0
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
PROMPT, GENERATED = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"
QUERIES, HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
# STORED: of the queries that memory did not have, those that a disk or host memory had.
STORED = "vllm:external_prefix_cache_hits_total"
POOLED = "mlx_parallm:encoder_tokens_total"
KV_USAGE = "vllm:kv_cache_usage_perc"
_SAMPLE = re.compile(r"^([a-z_:]+)(?:\{.*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class LoadSample:
    """The metrics of all engines and models together at one time.

    Attributes:
        at_s: when, by a clock of the caller.
        sums: the sum of each metric by name.
        kv_usage: the largest share of a model's KV blocks that are in use, 0 to 1.
    """

    at_s: float
    sums: Mapping[str, float] = field(default_factory=dict[str, float])
    kv_usage: float = 0.0

    @classmethod
    def of(cls, metrics: str, at_s: float) -> LoadSample:
        """Return the sample of ``GET /metrics``'s text."""
        sums: defaultdict[str, float] = defaultdict(float)
        kv_usage = 0.0
        for name, value in _SAMPLE.findall(metrics):
            sums[name] += float(value)
            kv_usage = max(kv_usage, float(value)) if name == KV_USAGE else kv_usage
        return cls(at_s, sums, kv_usage)

    @property
    def is_busy(self) -> bool:
        """True if a sequence runs or waits."""
        return bool(self.sums.get(RUNNING) or self.sums.get(WAITING))

    def line(self, before: LoadSample) -> dict[str, float | int]:
        """Return the fields of a line about the time since an earlier sample."""
        seconds = max(self.at_s - before.at_s, 1e-9)

        def new(name: str) -> float:
            return self.sums.get(name, 0.0) - before.sums.get(name, 0.0)

        queries = new(QUERIES)
        line: dict[str, float | int] = {
            "running": int(self.sums.get(RUNNING, 0)),
            "waiting": int(self.sums.get(WAITING, 0)),
            "prompt_tokens_per_s": round(new(PROMPT) / seconds, 1),
            "generated_tokens_per_s": round(new(GENERATED) / seconds, 1),
            "kv_used": round(self.kv_usage, 3),
        }
        if queries > 0:
            line["prefix_hits"] = round((new(HITS) + new(STORED)) / queries, 3)
        if new(STORED) > 0:
            line["stored_hits"] = round(new(STORED) / max(queries, 1), 3)
        if new(POOLED) > 0:
            line["pooled_tokens_per_s"] = round(new(POOLED) / seconds, 1)
        return line

    def has_worked_since(self, before: LoadSample) -> bool:
        """True if a token was read or generated since an earlier sample."""
        names = (PROMPT, GENERATED, POOLED)
        return any(self.sums.get(name, 0.0) > before.sums.get(name, 0.0) for name in names)


class LoadLog:
    """Logs the load of an engine while it has work, and once more after that."""

    def __init__(
        self,
        engine: EngineClient,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; ``run`` logs."""
        self._engine = engine
        self._sleep = sleep
        self._clock = clock
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Log from now on."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Log no more."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        before = LoadSample(self._clock())
        while True:
            await self._sleep(INTERVAL_S)
            try:
                body, _ = await self._engine.render_metrics()
            except ParallmError:
                # The engine starts, or is gone: others report that.
                continue
            now = LoadSample.of(body.decode(), self._clock())
            if now.is_busy or now.has_worked_since(before):
                logger.info("load", extra=now.line(before))
            before = now
