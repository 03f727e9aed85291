"""Measure what a step costs rank 0 and a follower to write and to read, and its bytes.

``python -m benchmarks.cluster_codec``. An engine whose runner computes nothing decodes rows; the
batch of each step is encoded where rank 0 would, decoded, and for comparison pickled. Rows begin
one step after the other, so that every step gives some of them a new block.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from benchmarks.checks import Check, conclude
from benchmarks.host_cost import BLOCK_SIZE, PROMPT_TOKENS, NoModel, NoStep
from mlx_parallm.bench.decode_load import DecodeLoad
from mlx_parallm.config import SchedulerConfig
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.distributed.codec import StepDecoder, StepEncoder
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.metrics import EngineMetrics
from mlx_parallm.generation.scheduler.scheduler import Scheduler
from mlx_parallm.process_setup.garbage import spare_garbage_collection
from mlx_parallm.tokenizer.loading import load_tokenizer
from mlx_parallm.types.step import ScheduledBatch

T = TypeVar("T")


@dataclass(slots=True)
class StepCosts:
    """The costs of steps, in microseconds and bytes."""

    encode_us: list[float] = field(default_factory=list[float])
    decode_us: list[float] = field(default_factory=list[float])
    sizes: list[int] = field(default_factory=list[int])
    pickle_us: list[float] = field(default_factory=list[float])
    pickle_sizes: list[int] = field(default_factory=list[int])


class EncodedModel(NoModel):
    """A runner that computes nothing, and sends its batches through the codec."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._encoder, self._decoder = StepEncoder(), StepDecoder()
        self.costs = StepCosts()
        self.pickles = False

    def submit(self, batch: ScheduledBatch) -> NoStep:
        """Take a step, and note what it costs to send."""
        costs = self.costs
        data = timed(costs.encode_us, lambda: self._encoder.encode(batch))
        timed(costs.decode_us, lambda: self._decoder.decode(data))
        costs.sizes.append(len(data))
        if self.pickles:
            pickled = timed(costs.pickle_us, lambda: pickle.loads(pickle.dumps(batch, 5)) and batch)
            costs.pickle_sizes.append(len(pickle.dumps(pickled, 5)))
        return super().submit(batch)


def timed(times_us: list[float], call: Callable[[], T]) -> T:
    begin = time.perf_counter()
    result = call()
    times_us.append(1e6 * (time.perf_counter() - begin))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    checks = [check for rows in args.rows for check in measure(rows, args.steps)]
    return conclude("cluster_codec", checks, {})


def measure(rows: int, steps: int) -> list[Check]:
    """Return the costs of steps in which ``rows`` rows decode."""
    runner = EncodedModel(rows * ((PROMPT_TOKENS + 2 * steps) // BLOCK_SIZE + 4))
    load = DecodeLoad(
        make_engine(runner, rows),
        [list(range(PROMPT_TOKENS + row % BLOCK_SIZE)) for row in range(rows)],
    )
    load.prefill()
    spare_garbage_collection()
    runner.costs = StepCosts()
    load.decode(steps)
    costs = runner.costs
    runner.costs, runner.pickles = StepCosts(), True
    load.decode(steps // 10)
    pickled = runner.costs
    is_target = rows == 128
    both = statistics.median(map(sum, zip(costs.encode_us, costs.decode_us, strict=True)))
    return [
        Check(f"{rows} rows: encode, us", statistics.median(costs.encode_us)),
        Check(f"{rows} rows: decode, us", statistics.median(costs.decode_us)),
        Check(f"{rows} rows: both, us", both, "<=", 100 if is_target else None),
        Check(f"{rows} rows: bytes, median", statistics.median(costs.sizes)),
        Check(f"{rows} rows: bytes, most", max(costs.sizes), "<=", 4096 if is_target else None),
        Check(f"{rows} rows: pickle and back, us", statistics.median(pickled.pickle_us)),
        Check(f"{rows} rows: pickle, bytes", statistics.median(pickled.pickle_sizes)),
    ]


def make_engine(runner: EncodedModel, rows: int) -> GenerationEngine:
    """Return an engine for so many rows, without a model."""
    kv = KVCacheManager(runner.info.num_blocks, BLOCK_SIZE, enable_prefix_caching=True)
    limits = SchedulerConfig(max_num_seqs=rows)
    scheduler = Scheduler(limits, kv, max_model_len=runner.info.max_model_len)
    metrics = EngineMetrics(MetricFamilies(), "none", runner.info)
    return GenerationEngine(scheduler, runner, load_tokenizer(DEMO_FOLDER), metrics)


if __name__ == "__main__":
    sys.exit(main())
