"""A runner whose host and device take simulated time, as MLX's streams do on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from mlx_parallm.config import SchedulerConfig
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.metrics import EngineMetrics
from mlx_parallm.generation.scheduler.scheduler import Scheduler
from mlx_parallm.generation.scheduler.step_cost import StepWork
from mlx_parallm.types.shape_buckets import padded_tokens
from mlx_parallm.types.step import (
    Runner,
    SampledToken,
    ScheduledBatch,
    StepInFlight,
    StepOutput,
    StepTracer,
)
from tests.fakes import ByteTokenizer, make_info

BLOCK_SIZE = 16


class VirtualClock:
    """A clock that stands still until a test or the simulated device advances it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCosts:
    """Seconds of a step; the defaults resemble an 8B model in bf16 on one H200.

    Attributes:
        device_s: of a step on the device, by its work.
        build_s: to build a step of decode rows.
        build_row_s: for each row more.
        build_prompts_s: to build a step with prompts, which is not compiled.
        launch_s: to launch a kernel.
        decode_kernels: those of a step of decode rows.
        prompt_kernels: those of a step with prompts.
        update_row_s: to schedule, update and publish a row.
        most_ahead: kernels that may be launched and not complete before a launch waits.
        noise: times on the device differ by up to this share.
        pads: True if a step with prompts is padded.
        fresh_s: to launch a step with prompts of another padded number than the latest few.
        num_sizes: how few.
    """

    device_s: Callable[[StepWork], float]
    build_s: float = 0.8e-3
    build_row_s: float = 7e-6
    build_prompts_s: float = 7e-3
    launch_s: float = 10e-6
    decode_kernels: int = 402
    prompt_kernels: int = 560
    update_row_s: float = 20e-6
    most_ahead: float = 363
    noise: float = 0.03
    pads: bool = True
    fresh_s: float = 0.0
    num_sizes: int = 2


def h200_8b(work: StepWork) -> float:
    """Return about what a step of 8B shape takes on one H200, in seconds."""
    tokens = work.decode_tokens + work.prefill_tokens
    products = max(4.7e-3, 3.2e-3 + 24e-6 * tokens)
    decode = 0.4e-3 + 4.1e-8 * work.decode_context if work.decode_tokens else 0.0
    return products + decode + 1.5e-9 * work.prefill_context + 1e-3


@dataclass
class SimulatedGpu(Runner):
    """Runs steps in simulated time.

    Kernels are launched one after the other; the device runs them in order. A launch waits while
    ``most_ahead`` kernels are not complete, as MLX's ``async_eval`` does.

    Attributes:
        steps: work and device seconds of each step; the work includes padding.
        padding: tokens of padding of each step.
        cuts: whether each step leaves a prompt unfinished.
    """

    costs: GpuCosts
    clock: VirtualClock
    seed: int = 0
    runs_ahead: bool = True
    steps: list[tuple[StepWork, float]] = field(default_factory=list[tuple[StepWork, float]])
    padding: list[int] = field(default_factory=list[int])
    cuts: list[bool] = field(default_factory=list[bool])

    def __post_init__(self) -> None:
        self.info = make_info(
            runs_ahead=self.runs_ahead, max_model_len=32_768, num_blocks=30_000, block_size=16
        )
        self.submits_beside = math.isinf(self.costs.most_ahead)
        self._random = Random(self.seed)
        # When each of the latest kernels is complete.
        self._complete: list[float] = [0.0]
        self._sizes: list[int] = []

    def submit(self, batch: ScheduledBatch) -> StepInFlight:
        costs, clock = self.costs, self.clock
        work = StepWork.of((row.start, len(row.token_ids)) for row in batch.sequences)
        padding = 0
        if work.prefill_tokens and costs.pads:
            tokens = work.decode_tokens + work.prefill_tokens
            padding = padded_tokens(tokens) - tokens
            work = replace(work, prefill_tokens=work.prefill_tokens + padding)
        self.padding.append(padding)
        self.cuts.append(any(row.sample is None for row in batch.sequences))
        device_s = costs.device_s(work) * self._random.uniform(1 - costs.noise, 1 + costs.noise)
        self.steps.append((work, device_s))
        clock.now_s += costs.build_row_s * len(batch.sequences)
        clock.now_s += costs.build_prompts_s if work.prefill_tokens else costs.build_s
        kernels = costs.prompt_kernels if work.prefill_tokens else costs.decode_kernels
        if work.prefill_tokens:
            size = work.decode_tokens + work.prefill_tokens
            if size not in self._sizes:
                clock.now_s += costs.fresh_s
            self._sizes = [size, *(other for other in self._sizes if other != size)]
            del self._sizes[costs.num_sizes :]
        complete = self._complete
        for _ in range(kernels):
            clock.now_s += costs.launch_s
            if len(complete) > costs.most_ahead:
                clock.now_s = max(clock.now_s, complete[-round(costs.most_ahead)])
            complete.append(max(complete[-1], clock.now_s) + device_s / kernels)
        del complete[:-1000]
        return _SimulatedStep(self, batch, complete[-1])


@dataclass(frozen=True, slots=True)
class _SimulatedStep(StepInFlight):
    gpu: SimulatedGpu
    batch: ScheduledBatch
    complete_s: float

    def wait(self) -> StepOutput:
        clock = self.gpu.clock
        clock.now_s = max(clock.now_s, self.complete_s)
        clock.now_s += self.gpu.costs.update_row_s * len(self.batch.sequences)
        tokens = (
            SampledToken(seq_id=row.seq_id, token_id=7)
            for row in self.batch.sequences
            if row.sample
        )
        return StepOutput(tokens=tuple(tokens))


def simulated_engine(
    gpu: SimulatedGpu,
    config: SchedulerConfig,
    tracer: StepTracer | None = None,
    *,
    default_stall_ms: float | None = None,
) -> GenerationEngine:
    """Return an engine of the simulated device."""
    kv = KVCacheManager(gpu.info.num_blocks, gpu.info.block_size, enable_prefix_caching=False)
    return GenerationEngine(
        Scheduler(
            config,
            kv,
            max_model_len=gpu.info.max_model_len,
            pads=gpu.costs.pads,
            default_stall_ms=default_stall_ms,
        ),
        gpu,
        ByteTokenizer(),
        EngineMetrics(MetricFamilies(), "bench", gpu.info),
        tracer=tracer,
        clock=gpu.clock,
    )
