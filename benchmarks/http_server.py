"""The real server before engines that compute nothing, for ``benchmarks.http_cost``.

It prints its port. For each line of its standard input it prints the processor seconds so far of
the event loop's thread and of the whole process, as JSON. ``--profile FILE`` profiles the thread.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import uvloop

from benchmarks.host_cost import NoModel, NoStep
from mlx_parallm.api.http.listener import bind
from mlx_parallm.cli.logs import configure_logging
from mlx_parallm.cli.serve import EngineServer
from mlx_parallm.config import EngineConfig, ModelConfig, SchedulerConfig
from mlx_parallm.demo_models.folders import DEMO_FOLDER, DEMO_FOLDERS
from mlx_parallm.engine.kind import BuiltModel, TellProgress
from mlx_parallm.engine.local_life import LocalLife
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation.assembly import reasoning_format_of, tool_format_of
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.generation.kv_cache.manager import KVCacheManager
from mlx_parallm.generation.metrics import EngineMetrics
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.generation.scheduler.scheduler import Scheduler
from mlx_parallm.pooling.engine import PoolingEngine
from mlx_parallm.pooling.metrics import PoolingMetrics
from mlx_parallm.pooling.model import PoolingModel
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.serving.async_engine import AsyncEngine
from mlx_parallm.serving.kinds import ignore_progress
from mlx_parallm.tokenizer.encoder_tokenizer import load_encoder_tokenizer
from mlx_parallm.tokenizer.loading import load_tokenizer
from mlx_parallm.types.pooling import PoolingInfo, PoolingInput
from mlx_parallm.types.step import ScheduledBatch, StepOutput
from mlx_parallm.worker.worker import Worker

CHAT, EMBED = "chat", "embed"
NUM_BLOCKS, MAX_NUM_SEQS = 8192, 128
# DIMS: of MiniLM's vectors.
DIMS = 384
# ROW_S: time of a step for each of its rows. The loop has to keep up with it: a reader that falls
# behind gets several tokens as one event.
ROW_S = 0.0003
MAX_WAITING = 20_000


class PacedModel(NoModel):
    """A runner whose steps take time, but no processor time."""

    def __init__(self, num_blocks: int, vocab_size: int) -> None:
        super().__init__(num_blocks)
        self.info = replace(self.info, vocab_size=vocab_size)

    def submit(self, batch: ScheduledBatch) -> PacedStep:
        """See ``NoModel``."""
        return PacedStep(batch)


class PacedStep(NoStep):
    """A step that lasts ``ROW_S`` for each row."""

    def wait(self) -> StepOutput:
        """See ``NoStep``."""
        time.sleep(ROW_S * len(self._batch.sequences))
        return super().wait()


class NoEncoder:
    """Implements ``PoolingRunner``: every input gets the same vector."""

    def __init__(self) -> None:
        self._vector = np.random.default_rng(0).standard_normal(DIMS, np.float32)

    def begin(self, inputs: Sequence[PoolingInput], slots: Mapping[str, int]) -> NoBatch:
        """See ``PoolingRunner``."""
        del slots
        return NoBatch([self._vector] * len(inputs))

    def release(self) -> None:
        """See ``PoolingRunner``."""


class NoBatch:
    """Implements ``PoolingJob``."""

    num_stages = 1

    def __init__(self, results: list[np.ndarray]) -> None:
        self._results = results

    def advance(self) -> None:
        """See ``PoolingJob``; there is one stage only."""

    def wait(self) -> list[np.ndarray]:
        """Return the results."""
        return self._results


def build(
    config: EngineConfig, families: MetricFamilies, worker: Worker, on_progress: TellProgress
) -> list[BuiltModel]:
    """Return a chat model and an embedder; see ``LocalLife``."""
    del worker, on_progress
    return [chat_model(config, families), embedder(families)]


def chat_model(config: EngineConfig, families: MetricFamilies) -> BuiltModel:
    """Return the embedded model's tokenizer and formats over a runner that computes nothing."""
    tokenizer, settings = load_tokenizer(DEMO_FOLDER), ModelConfig()
    runner = PacedModel(NUM_BLOCKS, tokenizer.vocab_size)
    info = runner.info
    kv = KVCacheManager(info.num_blocks, info.block_size, enable_prefix_caching=True)
    engine = GenerationEngine(
        Scheduler(config.scheduler, kv, max_model_len=info.max_model_len),
        runner,
        tokenizer,
        EngineMetrics(families, CHAT, info),
    )
    model = GenerationModel(
        names=(CHAT,),
        root=CHAT,
        created=int(time.time()),
        tokenizer=tokenizer.limited(info.max_model_len),
        info=info,
        tool_format=tool_format_of(settings, tokenizer),
        reasoning_format=reasoning_format_of(settings, tokenizer),
    )
    return BuiltModel(config.models[0], model, engine)


def embedder(families: MetricFamilies) -> BuiltModel:
    """Return the embedded embedder's tokenizer over a runner that computes nothing."""
    tokenizer = load_encoder_tokenizer(DEMO_FOLDERS["demo:embed"])
    info = PoolingInfo(
        architecture="none",
        vocab_size=tokenizer.vocab_size,
        max_model_len=512,
        dims=DIMS,
        dtype="none",
        weight_bytes=0,
        normalizes=True,
    )
    model = PoolingModel(
        names=(EMBED,),
        root=EMBED,
        created=int(time.time()),
        tokenizer=tokenizer,
        info=info,
        max_batch_tokens=8192,
        max_waiting=MAX_WAITING,
    )
    metrics = PoolingMetrics(families, EMBED)
    engine = PoolingEngine(NoEncoder(), max_tokens=8192, max_waiting=MAX_WAITING, metrics=metrics)
    return BuiltModel(ModelConfig(path=EMBED, served_names=(EMBED,)), model, engine)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=Path)
    args = parser.parse_args()
    configure_logging("info", "console")
    config = EngineConfig(
        models=(ModelConfig(served_names=(CHAT,)), ModelConfig(path=EMBED, served_names=(EMBED,))),
        scheduler=SchedulerConfig(max_num_seqs=MAX_NUM_SEQS),
    )
    engine = AsyncEngine(config, life=LocalLife(config, ignore_progress, build))
    engine.start()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(engine, config, args.profile))


async def serve(engine: AsyncEngine, config: EngineConfig, profile: Path | None) -> int:
    """Serve until SIGTERM, and report the processor time whenever a line asks for it."""
    profiler = None if profile is None else cProfile.Profile(time.thread_time)
    loop = asyncio.get_running_loop()

    def report() -> None:
        if not sys.stdin.readline():
            loop.remove_reader(sys.stdin.fileno())
            return
        print(json.dumps({"loop": time.thread_time(), "process": time.process_time()}), flush=True)

    loop.add_reader(sys.stdin.fileno(), report)
    with bind("127.0.0.1", 0) as listener:
        # Clients wait in its backlog until the server has started.
        listener.listen()
        print(listener.getsockname()[1], flush=True)
        max_waiting = config.scheduler.max_waiting
        server = EngineServer(engine, ServerConfig(), max_waiting, bound_to="127.0.0.1")
        if profiler is not None:
            profiler.enable()
        status = await server.run([listener])
    if profiler is not None and profile is not None:
        profiler.disable()
        profiler.dump_stats(profile)
    return status


if __name__ == "__main__":
    sys.exit(main())
