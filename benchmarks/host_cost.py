"""Measure a step's Python cost around the model: scheduler, detokenizer, events, metrics.

``python -m benchmarks.host_cost``. An engine whose runner computes nothing steps rows that decode.
Where a device waits for the host, as it does for a small model, every step is so much longer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

from benchmarks.checks import Check, conclude
from mlx_parallm.bench.decode_load import DecodeLoad
from mlx_parallm.bench.step_times import Span
from mlx_parallm.bench.step_trace import TraceRecorder
from mlx_parallm.config import SchedulerConfig
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.metrics import EngineMetrics
from mlx_parallm.generation.scheduler.scheduler import Scheduler
from mlx_parallm.process_setup.garbage import spare_garbage_collection
from mlx_parallm.tokenizer.loading import load_tokenizer
from mlx_parallm.types.step import Phase, RunnerInfo, SampledToken, ScheduledBatch, StepOutput

PROMPT_TOKENS, BLOCK_SIZE, ROUNDS = 512, 16, 5
PHASES = (Phase.SCHEDULE, Phase.UPDATE, Phase.DETOKENIZE, Phase.PUBLISH)


class NoModel:
    """Implements ``Runner``: every sample goes on with the same few tokens."""

    def __init__(self, num_blocks: int) -> None:
        self.info = RunnerInfo(
            path="none",
            vocab_size=1000,
            max_model_len=num_blocks * BLOCK_SIZE,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            kv_bytes=0,
            weight_bytes=0,
            has_state=False,
            attention_backend="none",
            dtype="none",
            runs_ahead=True,
        )

    def submit(self, batch: ScheduledBatch) -> NoStep:
        """Take a step; nothing is computed."""
        return NoStep(batch)


class NoStep:
    """Implements ``StepInFlight``."""

    def __init__(self, batch: ScheduledBatch) -> None:
        self._batch = batch

    def wait(self) -> StepOutput:
        """Return a token for each row that samples."""
        rows = [sequence for sequence in self._batch.sequences if sequence.sample is not None]
        tokens = (
            SampledToken(seq_id=sequence.seq_id, token_id=500 + sequence.start % 100)
            for sequence in rows
        )
        return StepOutput(tokens=tuple(tokens))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    checks: list[Check] = []
    for count in args.rows:
        times, spans = decode(count, args.steps)
        checks.append(Check(f"{count} rows: a step, us", 1e3 * statistics.median(times)))
        checks += [
            Check(f"{count} rows: {phase.value}, us", phase_us(spans, phase)) for phase in PHASES
        ]
    return conclude("host_cost", checks, {})


def decode(count: int, steps: int) -> tuple[list[float], Sequence[Span]]:
    """Return the milliseconds of steps in which ``count`` rows decode, and their phases."""
    recorder = TraceRecorder()
    engine = make_engine(count, ROUNDS * steps, recorder)
    load = DecodeLoad(engine, [list(range(PROMPT_TOKENS))] * count)
    load.prefill()
    load.decode(steps)
    spare_garbage_collection()
    recorder.spans.clear()
    return load.decode(ROUNDS * steps), recorder.spans


def make_engine(count: int, steps: int, recorder: TraceRecorder) -> GenerationEngine:
    """Return an engine for so many rows and steps, without a model."""
    blocks_each = (PROMPT_TOKENS + 2 * steps) // BLOCK_SIZE + 2
    runner = NoModel(count * blocks_each)
    kv = KVCacheManager(runner.info.num_blocks, BLOCK_SIZE, enable_prefix_caching=True)
    limits = SchedulerConfig(max_num_seqs=count)
    scheduler = Scheduler(limits, kv, max_model_len=runner.info.max_model_len)
    metrics = EngineMetrics(MetricFamilies(), "none", runner.info)
    return GenerationEngine(
        scheduler, runner, load_tokenizer(DEMO_FOLDER), metrics, tracer=recorder
    )


def phase_us(spans: Sequence[Span], phase: Phase) -> float:
    return 1e6 * statistics.median(span.duration_s for span in spans if span.phase is phase)


if __name__ == "__main__":
    sys.exit(main())
