"""A device of known cost under a real scheduler; time is simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from mlx_parallm.config import SchedulerConfig
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.scheduler.scheduler import Scheduler
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.types.step import SampledToken, ScheduledBatch, StepOutput


@dataclass(frozen=True)
class SimulatedStep:
    """Decode rows, positions they read, prefill tokens, positions those read, and seconds."""

    decode: int
    decode_context: float
    prefill: int
    prefill_context: float
    seconds: float


Cost = Callable[[int, float, int, float], float]


class SimulatedDevice:
    """Runs a scheduler's steps; a step takes what ``cost`` says, give or take ``noise``.

    The first step with prefill of each magnitude takes ``compile_s`` longer. With ``runs_ahead`` a
    step is scheduled before the one before it is taken in.
    """

    def __init__(
        self,
        cost: Cost,
        config: SchedulerConfig,
        *,
        noise: float = 0.05,
        compile_s: float = 0.0,
        runs_ahead: bool = False,
        seed: int = 0,
    ) -> None:
        kv = KVCacheManager(4000, 16, enable_prefix_caching=False)
        self.scheduler = Scheduler(config, kv, max_model_len=20_000)
        self.steps: list[SimulatedStep] = []
        self._cost = cost
        self._noise = noise
        self._compile_s = compile_s
        self._runs_ahead = runs_ahead
        self._random = Random(seed)
        self._compiled: set[int] = set()
        self._in_flight: tuple[ScheduledBatch, float] | None = None

    def add(self, name: str, prompt_len: int, max_tokens: int) -> None:
        request = GenerateRequest(
            request_id=name,
            model="m",
            prompt_ids=(1,) * prompt_len,
            params=SamplingParams(max_tokens=max_tokens),
        )
        self.scheduler.add(request, seed=0, end_ids=frozenset())

    def step(self) -> SimulatedStep | None:
        """Run one step; None if there was nothing left to schedule."""
        batch = self.scheduler.schedule()
        step = None if batch is None else self._run(batch)
        begun = None if batch is None or step is None else (batch, step.seconds)
        ending = begun
        if self._runs_ahead:
            ending, self._in_flight = self._in_flight, begun
        if ending is not None:
            self._end(*ending)
        return step

    def _run(self, batch: ScheduledBatch) -> SimulatedStep:
        rows = [(len(row.token_ids), row.start) for row in batch.sequences]
        short = [(count, count * (start + count / 2)) for count, start in rows if count < 16]
        chunks = [(count, count * (start + count / 2)) for count, start in rows if count >= 16]
        work = (
            sum(count for count, _ in short),
            sum(context for _, context in short),
            sum(count for count, _ in chunks),
            sum(context for _, context in chunks),
        )
        seconds = self._cost(*work) * self._random.uniform(1 - self._noise, 1 + self._noise)
        magnitude = work[2].bit_length()
        if magnitude not in self._compiled:
            self._compiled.add(magnitude)
            seconds += self._compile_s
        self.steps.append(SimulatedStep(*work, seconds))
        return self.steps[-1]

    def _end(self, batch: ScheduledBatch, seconds: float) -> None:
        self.scheduler.observe(batch, seconds)
        tokens = [
            SampledToken(seq_id=row.seq_id, token_id=7) for row in batch.sequences if row.sample
        ]
        self.scheduler.update(batch, StepOutput(tokens=tuple(tokens)))
        self.scheduler.check_integrity()
