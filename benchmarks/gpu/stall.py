"""How long a long prompt holds up running streams, with and without ``--max-decode-stall-ms``.

``python -m benchmarks.gpu.stall --shape 8B``: while 32 streams decode, a prompt of 16,000 random
tokens arrives. The time between tokens until that prompt's first token is compared with its median
before; the bound is three times that median, or ``--stall-ms``. Random bf16 weights.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import mlx.core as mx

from benchmarks.checks import Check, conclude
from benchmarks.gpu.engines import make_engine, random_prompts
from benchmarks.gpu.shapes import SHAPES, RandomModel, random_model
from mlx_parallm.bench.decode_load import DecodeLoad
from mlx_parallm.bench.statistics import percentile
from mlx_parallm.engine.engine import Engine
from mlx_parallm.outputs import TokenEvent
from mlx_parallm.request import GenerateRequest, SamplingParams

# Prompts before the one that is measured: the first compiles kernels.
WARMUPS = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8B", choices=SHAPES)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--context", type=int, default=512, help="of each stream, at first")
    parser.add_argument("--prompt-tokens", type=int, default=16_000)
    parser.add_argument("--steps", type=int, default=100, help="decode steps measured before")
    parser.add_argument("--stall-ms", type=float, help="default: three times the median before")
    args = parser.parse_args()
    model = random_model(args.shape)
    free_before, free, free_ttft = _measure(model, args, None)
    bound = args.stall_ms or 3 * free_before
    before, during, ttft = _measure(model, args, bound)
    checks = [
        Check("unbounded: median ITL before, ms", free_before),
        Check("unbounded: ITL p99 during prefill, ms", percentile(free, 99)),
        Check("unbounded: TTFT of the long prompt, ms", free_ttft),
        Check("bound, ms", bound),
        Check("bounded: median ITL before, ms", before),
        Check("bounded: ITL p99 during prefill, ms", percentile(during, 99)),
        Check("bounded: TTFT of the long prompt, ms", ttft),
        Check("bounded: ITL p99 in medians before", percentile(during, 99) / before, "<=", 3.0),
    ]
    return conclude("gpu_stall", checks, {"unbounded_ms": free, "bounded_ms": during})


def _measure(
    model: RandomModel, args: argparse.Namespace, stall_ms: float | None
) -> tuple[float, list[float], float]:
    """Median ITL before, each ITL during the prefill, and its time to first token, all in ms."""
    room = args.prompt_tokens + 64
    engine = make_engine(
        model,
        max_num_seqs=args.streams + 1,
        max_model_len=room,
        # Streams grow while the prompts are prefilled.
        kv_tokens=room + args.streams * (args.context + 4096),
        stall_ms=stall_ms,
    )
    load = DecodeLoad(engine, random_prompts(model, [args.context] * args.streams))
    load.prefill()
    for number in range(WARMUPS):
        _long_prompt(engine, model, args.prompt_tokens, number)
    before = [_step_ms(engine)[0] for _ in range(args.steps)]
    during = _long_prompt(engine, model, args.prompt_tokens, WARMUPS)
    load.end()
    del engine, load
    mx.clear_cache()
    return statistics.median(before), during, sum(during)


def _long_prompt(engine: Engine, model: RandomModel, length: int, number: int) -> list[float]:
    """Milliseconds of each step until a long prompt's only token; another prompt per number."""
    (prompt,) = random_prompts(model, [length], seed=number + 1)
    name = f"long-{number}"
    params = SamplingParams(temperature=0.0, max_tokens=1)
    engine.add(
        GenerateRequest(request_id=name, model="bench", prompt_ids=tuple(prompt), params=params)
    )
    steps: list[float] = []
    names: set[str] = set()
    while name not in names:
        milliseconds, names = _step_ms(engine)
        steps.append(milliseconds)
    return steps


def _step_ms(engine: Engine) -> tuple[float, set[str]]:
    """Milliseconds of a step, and which requests got a token."""
    started = time.perf_counter()
    events = engine.step() or []
    elapsed = time.perf_counter() - started
    return 1e3 * elapsed, {event.request_id for event in events if isinstance(event, TokenEvent)}


if __name__ == "__main__":
    sys.exit(main())
