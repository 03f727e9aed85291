"""Steps with prompts beside decode rows: times by rows and tokens, and closed loops of clients.

    python -m benchmarks.gpu.mixed_steps --json results/mixed-steps.json [--budget-s 100]

A step is ``Engine.step`` at 8B shape. Steps with a number of decode rows come first, with new
prompts in each or in every fourth. Then closed loops of clients run on engines without and with a
bound of the time between tokens; the phases of their steps are kept. A part that finds no time left
is left out.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.closed_loop import Load, StepLog, run_load
from benchmarks.gpu.bench import Bench, Sizes
from benchmarks.gpu.engines import BenchEngine, engine_for, random_prompts
from benchmarks.gpu.step_profile import SHAPE, Profile
from benchmarks.gpu.store import about_run
from mlx_parallm.bench.decode_load import DecodeLoad
from mlx_parallm.bench.statistics import percentile
from mlx_parallm.generation.assembly import CUDA_STALL_MS
from mlx_parallm.types.request import GenerateRequest, SamplingParams
from tests.builders.random_models import RandomModel

ROWS = (256, 128, 32)
CHUNKS = (0, 256, 512, 1024, 1536, 1792)
#: ``PROMPT``: tokens of a prompt; a step has as many prompts as its tokens need.
PROMPT = 350
#: ``CONTEXT``: tokens of the sequences that decode.
CONTEXT = 450
STEPS, WARM_UP = 8, 3
#: ``APART``: in loads of the second kind, prompts come in one of so many steps.
APART = 4
LOADS = {
    "256 clients, 350/200": Load(256, 350, 200, 448),
    "256 clients, 220/200": Load(256, 220, 200, 448),
    "32 clients, 350/200": Load(32, 350, 200, 80),
    "1 client, 512/100": Load(1, 512, 100, 4),
}
MOST_ROWS = max(ROWS)
#: ``BUDGET``: most tokens of a step.
BUDGET = 2048
#: ``ROOM``: tokens that a sequence may have, and slots beside the decode rows.
ROOM, SPARE = 1024, 32


@dataclass(frozen=True, slots=True)
class Stepped:
    """An engine, its model, and the log of its steps."""

    bench: Bench
    model: RandomModel
    engine: BenchEngine
    log: StepLog


def main() -> int:
    """Measure the parts in their order of worth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="the file of results")
    parser.add_argument("--budget-s", type=float, default=100.0, help="seconds in all")
    parser.add_argument("--shrink", action="store_true", help="sizes for a CPU")
    parser.add_argument("--bounds", nargs="*", default=["0", "default"], help="ms; 0: none")
    parser.add_argument("--loads", nargs="*", default=list(LOADS), help="how their names begin")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="of the steps")
    options = parser.parse_args()
    until_s = time.perf_counter() + options.budget_s
    profile = Profile(options.json, options.budget_s)
    bench = Bench(Sizes.tiny() if options.shrink else Sizes())
    profile.add("about", 0, partial(about_run, None))
    model = bench.model(SHAPE)
    names = [name for name in LOADS if name.startswith(tuple(options.loads))]
    for bound in options.bounds:
        started, log = time.perf_counter(), StepLog()
        with engine_for(
            model,
            max_num_seqs=bench.sizes.batch(MOST_ROWS) + SPARE,
            # The warm-up runs steps of one prompt, which may fill the budget.
            max_model_len=ROOM + BUDGET,
            kv_tokens=(bench.sizes.batch(MOST_ROWS) + SPARE) * ROOM,
            step_tokens=BUDGET,
            stall_ms=None if bound == "default" else float(bound),
            default_stall_ms=CUDA_STALL_MS,
            tracer=log,
            warms_up=not options.shrink,
        ) as (engine, _):
            stepped = Stepped(bench, model, engine, log)
            print(f"bound {bound}: ready after {time.perf_counter() - started:.1f} s", flush=True)
            if bound == "0":
                for rows in options.rows:
                    profile.add(f"steps of {rows}", 2, partial(mixed_steps, stepped, rows))
            for name in names:
                run = partial(loop, stepped, LOADS[name], until_s)
                profile.add(f"bound {bound}, {name}", 3, run)
    return 0


def mixed_steps(stepped: Stepped, rows: int) -> dict[str, Any]:
    """Return by tokens of the prompts: the median milliseconds of a step that has them.

    ``apart`` are all steps of a load that has prompts in every fourth, in order.
    """
    sizes, model = stepped.bench.sizes, stepped.model
    lengths = [sizes.tokens(CONTEXT)] * sizes.batch(rows)
    load = DecodeLoad(stepped.engine.engine, random_prompts(model, lengths, seed=rows))
    load.prefill()
    load.decode(WARM_UP)
    results: dict[str, Any] = {}
    names = itertools.count()
    for chunk in CHUNKS:
        count = sizes.tokens(chunk) if chunk else 0
        for apart in (1, APART):
            stepped.log.clear()
            times: list[float] = []
            for number in range(WARM_UP + STEPS * (1 if apart == 1 else 2)):
                if count and number % apart == 0:
                    _submit(stepped, count, f"chunk-{rows}-{next(names)}")
                started = time.perf_counter()
                stepped.engine.engine.step()
                times.append(round(1e3 * (time.perf_counter() - started), 3))
            key = str(chunk) if apart == 1 else f"{chunk} in each {apart}th"
            results[key] = {
                "median ms": statistics.median(times[WARM_UP:]),
                "mean ms": round(statistics.fmean(times[WARM_UP:]), 3),
                "times ms": times,
                **stepped.log.record(),
            }
            if not count:
                break
    load.end()
    # Whatever is in flight ends.
    while stepped.engine.engine.step() is not None:
        pass
    print({name: result["median ms"] for name, result in results.items()}, flush=True)
    return results


def _submit(stepped: Stepped, num_tokens: int, name: str) -> None:
    """Queue prompts of so many tokens together, each of which gets one token."""
    lengths = [PROMPT] * (num_tokens // PROMPT)
    rest = num_tokens - sum(lengths)
    lengths += [rest] if rest else []
    # Python's hash of a text differs between processes.
    prompts = random_prompts(stepped.model, lengths, seed=zlib.crc32(name.encode()))
    for number, prompt in enumerate(prompts):
        stepped.engine.engine.submit(
            GenerateRequest(
                request_id=f"{name}-{number}",
                model="bench",
                prompt_ids=tuple(prompt),
                params=SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1),
            )
        )


def loop(stepped: Stepped, load: Load, until_s: float) -> dict[str, Any]:
    """Return what clients saw of a load, and its steps."""
    if not stepped.bench.sizes.is_full:
        load = Load(4, 12, 6, 12)
    stepped.log.clear()
    times = run_load(
        stepped.engine.engine,
        load,
        vocab_size=stepped.model.vocab_size,
        seed=time.perf_counter_ns(),
        until_s=until_s,
    )
    print(times.figures(), summary(stepped.log), flush=True)
    return {**times.figures(), **summary(stepped.log), **stepped.log.record()}


def summary(log: StepLog) -> dict[str, float]:
    """Return how many steps had prompts beside decode rows, their median tokens, and their time."""
    ends, before_s = log.ends_s(), 0.0
    tokens: list[int] = []
    times: list[float] = []
    for step_id, (decode, prefill, _) in log.steps.items():
        end_s = ends.get(step_id, before_s)
        if decode and prefill:
            tokens.append(prefill)
            times.append(1e3 * (end_s - before_s))
        before_s = end_s
    return {
        "mixed steps": len(tokens),
        "all steps": len(log.steps),
        "their tokens p50": statistics.median(tokens or [0]),
        "their ms p50": round(percentile(times, 50), 2),
        "their ms p90": round(percentile(times, 90), 2),
        "their ms max": round(max(times, default=0.0), 2),
    }


if __name__ == "__main__":
    sys.exit(main())
