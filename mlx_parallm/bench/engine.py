"""The command ``mlx_parallm bench engine``, which shows where decode steps spend their time."""

from __future__ import annotations

import argparse
import importlib
import random
from pathlib import Path
from typing import cast

from mlx_parallm.bench.arguments import not_negative_number, output_file, positive
from mlx_parallm.bench.decode_load import DecodeLoad
from mlx_parallm.bench.step_times import format_steps, summarise_steps
from mlx_parallm.bench.step_trace import TraceRecorder, write_trace
from mlx_parallm.config import EngineConfig, ModelConfig, SchedulerConfig
from mlx_parallm.engine.metrics import MetricFamilies
from mlx_parallm.generation.engine import GenerationEngine
from mlx_parallm.generation.model import GenerationModel
from mlx_parallm.process_setup.device_process import prepare_device_process
from mlx_parallm.process_setup.garbage import spare_garbage_collection
from mlx_parallm.serving.kinds import ignore_progress
from mlx_parallm.types.errors import ConfigError

# PREFILL_TOKENS: least prompt tokens of a prefill step, which bounds the tokens that the first
# request decodes before the last one is prefilled.
PREFILL_TOKENS = 512
# WARMUP_STEPS: steps before the measured ones.
WARMUP_STEPS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``mlx_parallm bench engine``."""
    parser.add_argument("--model", help="hub id or folder; default: the demonstration model")
    parser.add_argument("--dtype", default="auto", help="as for serve; default: %(default)s")
    parser.add_argument(
        "--batch-size", type=positive, default=64, help="requests; default: %(default)s"
    )
    parser.add_argument(
        "--prompt-tokens", type=positive, default=128, help="per request; default: %(default)s"
    )
    parser.add_argument(
        "--steps", type=positive, default=100, help="decode steps measured; default: %(default)s"
    )
    parser.add_argument(
        "--temperature", type=not_negative_number, default=0.0, help="default: greedy, %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts' random tokens")
    parser.add_argument(
        "--trace",
        type=output_file,
        metavar="FILE",
        help="write every step as a Chrome trace, for https://ui.perfetto.dev",
    )


def run(args: argparse.Namespace) -> int:
    """Run the engine, print where a step's time goes, and write the trace.

    Raises:
        ConfigError: the model cannot hold the requests, or the trace cannot be written.
        ModelLoadError: the model could not be loaded.
        StepError: a step failed.
    """
    recorder = TraceRecorder()
    name, engine = _build(args, recorder)
    # A server does so once it has loaded: a full collection takes 100 to 300 ms.
    spare_garbage_collection()
    info = engine.info
    draw = random.Random(args.seed)
    prompts = [
        [draw.randrange(info.vocab_size) for _ in range(args.prompt_tokens)]
        for _ in range(args.batch_size)
    ]
    load = DecodeLoad(engine, prompts, temperature=args.temperature)
    prefill_s = sum(load.prefill()) / 1e3
    load.decode(WARMUP_STEPS)
    load.decode(args.steps)
    summary = summarise_steps(recorder.spans, args.steps)
    load.end()
    print(
        f"{name}, {info.path} path, {info.attention_backend} attention,"
        f" steps {'run' if info.runs_ahead else 'do not run'} ahead\n"
        f"prefill of {args.batch_size} x {args.prompt_tokens} tokens: {prefill_s:.2f} s\n"
    )
    print(format_steps(summary))
    if args.trace is not None:
        _write(recorder, args.trace)
    return 0


def _build(args: argparse.Namespace, recorder: TraceRecorder) -> tuple[str, GenerationEngine]:
    """Load the model on this thread; return its name and its engine."""
    prefill_steps = -(-args.batch_size * args.prompt_tokens // PREFILL_TOKENS)
    length = args.prompt_tokens + prefill_steps + WARMUP_STEPS + args.steps + WARMUP_STEPS
    config = EngineConfig(
        models=(ModelConfig(path=args.model, dtype=args.dtype, max_model_len=length),),
        scheduler=SchedulerConfig(
            max_num_seqs=args.batch_size, max_waiting=args.batch_size, max_decode_stall_ms=0
        ),
    )
    prepare_device_process()
    # MLX takes long to import, and ``bench serve`` does not need it.
    build = importlib.import_module("mlx_parallm.serving.build")
    worker = build.Worker(recorder)
    (built,) = build.build_engines(
        config, MetricFamilies(), worker, ignore_progress, tracer=recorder
    )
    name = built.model.names[0]
    if not isinstance(built.model, GenerationModel):
        raise ConfigError(f"{name} is a pooling model: it generates nothing.")
    return name, cast("GenerationEngine", built.engine)


def _write(recorder: TraceRecorder, path: Path) -> None:
    try:
        write_trace(recorder.spans, path)
    except OSError as problem:
        raise ConfigError(f"--trace: {path}: {problem.strerror}") from None
    print(f"trace: {path} (open it in https://ui.perfetto.dev)")
