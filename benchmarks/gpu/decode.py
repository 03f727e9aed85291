"""Decode speed of ``Engine.step`` against mlx_lm's ``BatchGenerator``, random bf16 weights.

``python -m benchmarks.gpu.decode --shapes 0.6B 8B --batches 1 8 32 128`` prints and writes one row
per shape and batch as it is measured; rows that the file has already are skipped. ``--trace
FOLDER`` adds a Chrome trace of each, and prints where the time of a step goes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks.gpu.engines import batch_generator_ms, make_engine, random_prompts
from benchmarks.gpu.shapes import SHAPES, RandomModel, flatten, random_model
from mlx_parallm.bench.decode_load import DecodeLoad
from mlx_parallm.bench.step_times import format_steps, summarise_steps
from mlx_parallm.bench.step_trace import TraceRecorder, write_trace

STEPS = 50


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["0.6B", "8B"], choices=SHAPES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--bits", type=int, help="quantise the weights, in groups of 64")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--output", type=Path, default=Path("results/gpu_decode.json"))
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="write Chrome traces here")
    args = parser.parse_args()
    rows = json.loads(args.output.read_text()) if args.output.exists() else {}
    for shape in args.shapes:
        names = {
            batch: f"{shape} {args.bits or 'bf16'} {args.context} x {batch}"
            for batch in args.batches
        }
        wanted = {batch: name for batch, name in names.items() if name not in rows}
        if wanted:
            _measure_shape(shape, wanted, args, rows)
    return 0


def _measure_shape(
    shape: str, wanted: dict[int, str], args: argparse.Namespace, rows: dict[str, Any]
) -> None:
    model = random_model(shape, bits=args.bits)
    lengths = {batch: [args.context] * batch for batch in wanted}
    stock = {
        batch: batch_generator_ms(model, random_prompts(model, lengths[batch]), args.steps)
        for batch in wanted
    }
    if args.bits is not None:
        flatten(model)
    for batch, name in wanted.items():
        trace = args.trace / f"{name.replace(' ', '-')}.json" if args.trace else None
        rows[name] = _row(model, lengths[batch], stock[batch], args.steps, trace)
        print(name, rows[name], flush=True)
        args.output.parent.mkdir(exist_ok=True, parents=True)
        args.output.write_text(json.dumps(rows, indent=1) + "\n")


def _row(
    model: RandomModel, lengths: list[int], stock_ms: float, steps: int, trace: Path | None
) -> dict[str, Any]:
    room = max(lengths) + steps + 64
    recorder = None if trace is None else TraceRecorder()
    engine = make_engine(model, max_num_seqs=len(lengths), max_model_len=room, tracer=recorder)
    load = DecodeLoad(engine, random_prompts(model, lengths))
    prefill_s = load.prefill()
    ours_ms = load.decode(steps)
    if recorder is not None and trace is not None:
        _trace(recorder, trace, steps)
    load.end()
    info = engine.info
    del engine, load
    mx.clear_cache()
    return {
        "BatchGenerator ms": round(stock_ms, 3),
        "Engine.step ms": round(ours_ms, 3),
        "ratio": round(stock_ms / ours_ms, 3),
        "prefill tokens/s": round(sum(lengths) / prefill_s),
        "backend": info.attention_backend,
        "path": info.path,
        "runs ahead": info.runs_ahead,
    }


def _trace(recorder: TraceRecorder, path: Path, steps: int) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    write_trace(recorder.spans, path)
    print(format_steps(summarise_steps(recorder.spans, steps)), flush=True)
    print(f"trace: {path}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
