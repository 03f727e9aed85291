"""Measures the demonstration model with the device's kernels, and with stock operations alone."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from mlx_parallm.config import CacheConfig, EngineConfig, ModelConfig
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.serving.build import build_engines
from mlx_parallm.serving.kinds import ignore_progress
from mlx_parallm.types.errors import ParallmError
from mlx_parallm.types.events import ErrorEvent
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from mlx_parallm.worker.device.faults import MODEL_ERRORS
from mlx_parallm.worker.device.properties import backend_name, cache_memory_bytes, give_back_memory
from mlx_parallm.worker.generation.load.plan import DecoderChoices
from mlx_parallm.worker.ops import Load, Op, Pending, Unload
from mlx_parallm.worker.worker import Worker

R = TypeVar("R")

# FEW_ROWS, MANY_ROWS: requests at once.
FEW_ROWS, MANY_ROWS = 1, 16
# PROMPT_TOKENS, NUM_TOKENS: tokens of a prompt, and of an answer.
PROMPT_TOKENS, NUM_TOKENS = 16, 32
# MEASURED_S: seconds of rounds, at least one, after one that compiles; the fastest counts.
MEASURED_S = 1.0
KV_BYTES = 64 << 20
# DEMO: the demonstration model.
DEMO = ModelConfig()
# REFERENCE: the name of the attention backend of stock operations.
REFERENCE = "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpeed:
    """Generated tokens of all rows per second.

    Attributes:
        attention: the attention backend that the model chose.
        one_row: with one request.
        many_rows: with 16 requests at once.
    """

    attention: str
    one_row: float
    many_rows: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedReport:
    """The speed of the demonstration model, and the memory that MLX keeps for new arrays.

    Attributes:
        kernels: with the device's kernels.
        stock: with stock operations alone; None on CUDA, where MLX would compile their attention
            anew for each length, which takes minutes.
        cache_before_bytes: freed memory that MLX kept before the measurement.
        cache_after_bytes: after it.
        problem: why nothing was measured; None if it was.
    """

    kernels: ModelSpeed | None = None
    stock: ModelSpeed | None = None
    cache_before_bytes: int = 0
    cache_after_bytes: int = 0
    problem: str | None = None


def speed_report(model: ModelConfig = DEMO) -> SpeedReport | None:
    """Load a model that generates and measure it, on the calling thread.

    On a CPU, which has no kernels to compare, nothing is measured, and None is returned.
    """
    if backend_name() == "cpu":
        return None
    before = cache_memory_bytes()
    try:
        kernels = _measured(model, Worker())
        stock = None if backend_name() == "cuda" else _measured(model, StockWorker())
    except (ParallmError, *MODEL_ERRORS) as problem:
        return SpeedReport(problem=f"{type(problem).__name__}: {problem}")
    after = cache_memory_bytes()
    give_back_memory()
    return SpeedReport(
        kernels=kernels, stock=stock, cache_before_bytes=before, cache_after_bytes=after
    )


class StockWorker(Worker):
    """A worker whose models compute with stock operations, whatever kernels the device has."""

    def begin(self, op: Op[R]) -> Pending[R]:
        """Load a model twice: its kernels are known, and can be refused, after the first time."""
        if isinstance(op, Load):
            plan = super().begin(op).wait()
            super().begin(Unload(model=op.model))
            changed: Any = replace(op, plan=replace(plan, choices=_without_kernels(plan.choices)))
            return super().begin(changed)
        return super().begin(op)


def _without_kernels(choices: DecoderChoices) -> DecoderChoices:
    return replace(
        choices,
        attention=REFERENCE,
        kernels=dict.fromkeys(choices.kernels, False),
        samples_by_kernel=False,
        adapts_by_kernel=False,
    )


def _measured(model: ModelConfig, worker: Worker) -> ModelSpeed:
    config = EngineConfig(
        models=(model,), cache=CacheConfig(kv_cache_bytes=KV_BYTES), warm_up=False
    )
    (built,) = build_engines(config, MetricFamilies(), worker, ignore_progress)
    engine: Any = built.engine
    chance = random.Random(0)
    return ModelSpeed(
        attention=engine.info.attention_backend,
        one_row=_tokens_per_s(engine, FEW_ROWS, chance),
        many_rows=_tokens_per_s(engine, MANY_ROWS, chance),
    )


def _tokens_per_s(engine: GenerationEngine, num_rows: int, chance: random.Random) -> float:
    _round_s(engine, num_rows, chance)
    rounds_s = [_round_s(engine, num_rows, chance)]
    while sum(rounds_s) < MEASURED_S:
        rounds_s.append(_round_s(engine, num_rows, chance))
    return round(num_rows * NUM_TOKENS / min(rounds_s), 1)


def _round_s(engine: GenerationEngine, num_rows: int, chance: random.Random) -> float:
    """Return the seconds in which each of these rows generates ``NUM_TOKENS``."""
    for row in range(num_rows):
        engine.submit(_request(engine, f"row {row}", chance))
    start_s = time.perf_counter()
    while engine.has_work():
        for event in engine.step() or ():
            if isinstance(event, ErrorEvent):
                raise event.error
    return time.perf_counter() - start_s


def _request(engine: GenerationEngine, name: str, chance: random.Random) -> GenerateRequest:
    """Return a request with a random prompt, which is in no cache."""
    return GenerateRequest(
        request_id=name,
        model="",
        prompt_ids=tuple(chance.randrange(engine.info.vocab_size) for _ in range(PROMPT_TOKENS)),
        params=SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
    )
