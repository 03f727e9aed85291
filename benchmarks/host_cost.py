"""Measure a step's Python cost around the model: scheduler, detokenizer, events, metrics.

``python -m benchmarks.host_cost``. An engine whose runner computes nothing steps rows that decode;
times are processor time of its thread. Where a device waits for the host, every step is so much
longer.
``--kv-disk`` gives it a disk store. ``--against TREE`` compares it with another checkout of this
project: both run in turns, ``--pairs`` times, without a store and with one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.checks import RESULTS, Check, conclude
from mlx_parallm.bench.decode_load import DecodeLoad
from mlx_parallm.bench.step_times import Span
from mlx_parallm.bench.step_trace import TraceRecorder
from mlx_parallm.config import SchedulerConfig
from mlx_parallm.demo_models.folders import DEMO_FOLDER
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.generation.kv_cache.disk.store import DiskStore
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.kv_cache.tiers import Tiers
from mlx_parallm.generation.metrics import EngineMetrics
from mlx_parallm.generation.scheduler.scheduler import Scheduler
from mlx_parallm.peers import child_process
from mlx_parallm.process_setup.garbage import spare_garbage_collection
from mlx_parallm.tokenizer.loading import load_tokenizer
from mlx_parallm.types.step import (
    Phase,
    Runner,
    RunnerInfo,
    SampledToken,
    ScheduledBatch,
    StepOutput,
)

PROMPT_TOKENS, BLOCK_SIZE, ROUNDS = 512, 16, 5
# BLOCK_BYTES: of KV, which nothing reads here.
BLOCK_BYTES, DISK_BYTES = 1 << 20, 1 << 30
#: ``HERE``: this checkout.
HERE = Path(__file__).resolve().parents[1]
STEP, MOST = "{} rows: a step, us", 1.02
PHASES = (Phase.SCHEDULE, Phase.UPDATE, Phase.DETOKENIZE, Phase.PUBLISH)


class NoModel(Runner):
    """Every sample goes on with the same few tokens."""

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
    parser.add_argument("--kv-disk", type=Path, help="folder of a disk store")
    parser.add_argument("--against", type=Path, metavar="TREE", help="another checkout")
    parser.add_argument("--pairs", type=int, default=5, help="turns of --against")
    args = parser.parse_args()
    if args.against is not None:
        return conclude("host_cost_against", *compare(args))
    checks: list[Check] = []
    for count in args.rows:
        spans = decode(count, args.steps, args.kv_disk)
        checks.append(Check(STEP.format(count), phase_us(spans, Phase.STEP)))
        checks += [
            Check(f"{count} rows: {phase.value}, us", phase_us(spans, phase)) for phase in PHASES
        ]
    return conclude("host_cost", checks, {})


def compare(args: argparse.Namespace) -> tuple[list[Check], dict[str, list[dict[str, float]]]]:
    """Return steps of this tree over those of another one, and all of them."""
    base = ["--steps", str(args.steps), "--rows", *map(str, args.rows)]
    times: dict[str, list[dict[str, float]]] = {"other": [], "off": [], "on": []}
    with tempfile.TemporaryDirectory() as folder:
        store = ["--kv-disk", str(Path(folder) / "kv")]
        runs: dict[str, tuple[Path, list[str]]] = {
            "other": (args.against.resolve(), base),
            "off": (HERE, base),
            "on": (HERE, base + store),
        }
        where = Path(folder)
        for number in range(args.pairs):
            for name in list(runs) if number % 2 else reversed(runs):
                tree, arguments = runs[name]
                times[name].append(step_times(tree, arguments, where))
                print(name, times[name][-1], flush=True)
    checks: list[Check] = []
    for count in args.rows:
        steps = {name: [each[str(count)] for each in of_tree] for name, of_tree in times.items()}
        checks.append(Check(f"{count} rows: a step of the other, us", min(steps["other"])))
        for name, what in (("off", "without a store"), ("on", "with a disk store")):
            ratios = [own / old for own, old in zip(steps[name], steps["other"], strict=True)]
            least = min(steps[name]) / min(steps["other"])
            checks += [
                Check(f"{count} rows: {what}, median ratio", statistics.median(ratios), "<=", MOST),
                Check(f"{count} rows: {what}, ratio of the least", least, "<=", MOST),
            ]
    return checks, times


def step_times(tree: Path, arguments: Sequence[str], folder: Path) -> dict[str, float]:
    """Return the microseconds of a step by the number of rows, as a tree measures them."""
    child_process.run(
        ["benchmarks.host_cost", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.DEVNULL,
    ).check_returncode()
    checks = json.loads((folder / RESULTS / "host_cost.json").read_text())["checks"]
    values = {check["what"]: check["value"] for check in checks}
    ending = STEP.format("")
    return {what.removesuffix(ending): us for what, us in values.items() if what.endswith(ending)}


def decode(count: int, steps: int, kv_disk: Path | None = None) -> Sequence[Span]:
    """Return the phases of steps in which ``count`` rows decode."""
    recorder = TraceRecorder(time.thread_time)
    engine = make_engine(count, ROUNDS * steps, recorder, kv_disk)
    load = DecodeLoad(engine, [list(range(PROMPT_TOKENS))] * count)
    load.prefill()
    load.decode(steps)
    spare_garbage_collection()
    recorder.spans.clear()
    load.decode(ROUNDS * steps)
    engine.close()
    return recorder.spans


def make_engine(
    count: int, steps: int, recorder: TraceRecorder, kv_disk: Path | None
) -> GenerationEngine:
    """Return an engine for so many rows and steps, without a model."""
    blocks_each = (PROMPT_TOKENS + 2 * steps) // BLOCK_SIZE + 2
    runner = NoModel(count * blocks_each)
    tiers = None
    if kv_disk is not None:
        tiers = Tiers([DiskStore(kv_disk, "0e", DISK_BYTES)], block_bytes=BLOCK_BYTES)
    kv = KVCacheManager(runner.info.num_blocks, BLOCK_SIZE, enable_prefix_caching=True, tiers=tiers)
    limits = SchedulerConfig(max_num_seqs=count)
    scheduler = Scheduler(limits, kv, max_model_len=runner.info.max_model_len)
    metrics = EngineMetrics(MetricFamilies(), "none", runner.info)
    engine = GenerationEngine(
        scheduler, runner, load_tokenizer(DEMO_FOLDER), metrics, tiers=tiers, tracer=recorder
    )
    if tiers is not None:
        # There are no weights to compare, so any name of them will do.
        engine.policies.base.identity = engine.policies.base.lasting.digest = "none"
    return engine


def phase_us(spans: Sequence[Span], phase: Phase) -> float:
    return 1e6 * statistics.median(span.duration_s for span in spans if span.phase is phase)


if __name__ == "__main__":
    sys.exit(main())
