"""A profile of decode steps by number of rows: what the device does, and what it waits for.

    python -m benchmarks.gpu.step_profile --json results/step-profile.json [--budget-s 130]

A step is ``Engine.step`` at 8B shape and 512 tokens of context. Beside its time and the phases of
the host it measures the steps from a prompt to its first token, the products of all layers, writing
and attending of a layer, and the bandwidth. If PyTorch is installed, its profiler records the
kernels of the same steps through CUPTI, which sees those of MLX too. A part that fails or finds no
time left is left out, and the file says why. ``--bits`` and ``--mode`` pack the weights.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks.gpu.bench import Bench, Sizes
from benchmarks.gpu.check_kernels import BLOCK_SIZE, DIM, HEADS, attention_layers
from benchmarks.gpu.engines import BenchEngine, Layers, engine_for, random_prompts
from benchmarks.gpu.store import about_run
from mlx_parallm.bench.decode_load import DecodeLoad
from mlx_parallm.bench.step_times import step_times, summarise_steps
from mlx_parallm.bench.step_trace import TraceRecorder
from mlx_parallm.kernels.language import CudaLanguage
from mlx_parallm.worker.attention.base import LayerShape
from mlx_parallm.worker.attention.kernel_backend import KernelAttention
from mlx_parallm.worker.layers.packing import AFFINE
from tests.builders.random_models import RandomModel, flatten

SHAPE = "8B"
#: ``ROWS``: row counts of steps, the most rows first.
ROWS = (512, 256, 192, 128, 32, 8, 1)
PRODUCT_ROWS = (1, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512)
ATTEND_ROWS = (1, 8, 16, 32, 64, 128, 192, 256, 512)
CONTEXT = 512
#: ``ROOM``: tokens that a sequence may decode, also while others prefill.
ROOM = 160
STEPS, WARM_UP, RECORDED_STEPS = 24, 6, 4
REPEATS = 7
#: ``DEVICE_WORK``: what the profiler calls the device's work.
DEVICE_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
#: ``FIRST_TOKENS``: prompts whose first tokens are timed, one after the other.
FIRST_TOKENS = 4
#: ``LAUNCH_US``: the device is idle for up to so long between two kernels that are both launched.
LAUNCH_US = 5.0
#: ``KERNELS``: how many of the longest kernels are kept by name.
KERNELS = 30


class Profile:
    """The parts of a profile and their time; the file is written after each part."""

    def __init__(self, path: Path, budget_s: float) -> None:
        self._path = path
        self._end = time.monotonic() + budget_s
        self.parts: dict[str, Any] = {}

    def add(self, name: str, needs_s: float, measure: Callable[[], Any]) -> None:
        """Measure a part if there is time for it; keep why there are no figures."""
        started = time.monotonic()
        result: Any = {"missing": "there was no time left"}
        if self._end - started >= needs_s:
            try:
                result = measure()
            except Exception as error:  # noqa: BLE001 - other parts are measured whatever fails
                result = {"missing": f"{type(error).__name__}: {error}"[-1000:]}
        seconds = round(time.monotonic() - started, 2)
        self.parts[name] = {"figures": result, "seconds": seconds}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.parts, indent=1) + "\n")
        print(f"{name}: {seconds} s {json.dumps(result)[:3000]}", flush=True)


def main() -> int:
    """Measure the parts in their order of worth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="the file of results")
    parser.add_argument("--budget-s", type=float, default=130.0, help="seconds in all")
    parser.add_argument("--shrink", action="store_true", help="sizes for a CPU")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="the most first")
    parser.add_argument("--bits", type=int, help="of packed weights")
    parser.add_argument("--mode", default=AFFINE, help="of packed weights, as mx.quantize has it")
    options = parser.parse_args()
    profile = Profile(options.json, options.budget_s)
    bench = Bench(Sizes.tiny() if options.shrink else Sizes())
    profile.add("about", 0, partial(about_run, None))
    profile.add("copy TB/s", 2, lambda: bench.bandwidth() / 1e12)
    model = bench.model(SHAPE, options.bits, options.mode)
    with running_engine(bench, model, options.rows[0]) as profiled:
        profile.add("facts", 0, profiled.engine.facts)
        profile.add("first token", 1, partial(first_token, profiled))
        for rows in options.rows:
            profile.add(f"steps of {rows}", 1, partial(engine_steps, profiled, rows))
            profile.add(f"kernels of {rows}", 2, partial(recorded_steps, profiled, rows))
    if options.bits is None:
        profile.add("products", 6, partial(products, bench))
        bench.release()
        profile.add("attention", 8, partial(attention, bench.sizes))
    return 0


@dataclass(frozen=True, slots=True)
class Profiled:
    """The engine whose steps are profiled, and what records its phases."""

    bench: Bench
    model: RandomModel
    engine: BenchEngine
    recorder: TraceRecorder

    def load(self, rows: int, seed: int = 0) -> DecodeLoad:
        """Return requests with prompts of the profile's length."""
        lengths = [self.bench.sizes.tokens(CONTEXT)] * self.bench.sizes.batch(rows)
        return DecodeLoad(self.engine.engine, random_prompts(self.model, lengths, seed=seed))

    @contextmanager
    def decoding(self, rows: int) -> Iterator[DecodeLoad]:
        """Yield requests that decode and are warm; they end with the context."""
        load = self.load(rows)
        load.prefill()
        load.decode(WARM_UP)
        try:
            yield load
        finally:
            load.end()


@contextmanager
def running_engine(bench: Bench, model: RandomModel, most_rows: int) -> Iterator[Profiled]:
    """Yield an engine for the most rows, whose prompts are in its prefix cache."""
    context, rows = bench.sizes.tokens(CONTEXT), bench.sizes.batch(most_rows)
    recorder = TraceRecorder()
    with engine_for(
        model,
        max_num_seqs=rows,
        max_model_len=context + ROOM,
        kv_tokens=(rows + FIRST_TOKENS) * (context + ROOM),
        tracer=recorder,
    ) as (engine, _):
        profiled = Profiled(bench, model, engine, recorder)
        load = profiled.load(rows)
        load.prefill()
        load.end()
        yield profiled


def first_token(profiled: Profiled) -> dict[str, Any]:
    """Return milliseconds of the steps until a new prompt's first token, and of their phases."""
    results: dict[str, Any] = {}
    for turn in range(FIRST_TOKENS):
        load = profiled.load(1, seed=-1 - turn)
        profiled.recorder.spans.clear()
        results[str(turn)] = {
            "steps ms": load.prefill(),
            "phases ms": [
                {str(phase): 1e3 * seconds for phase, seconds in step.self_s.items()}
                for step in step_times(profiled.recorder.spans)
            ],
        }
        load.end()
    return results


def engine_steps(profiled: Profiled, rows: int) -> dict[str, Any]:
    """Return milliseconds of a step, of the host's phases, and of the floor."""
    model, spans = profiled.model, profiled.recorder.spans
    with profiled.decoding(rows) as load:
        tokens = load.num_tokens
        spans.clear()
        cpu_s = time.thread_time()
        times = load.decode(STEPS)
        cpu_s = time.thread_time() - cpu_s
        steps = summarise_steps(spans, len(times))
        kv_bytes = (tokens + load.num_tokens) / 2 * profiled.engine.bytes_per_token
    read = model.loaded.weight_bytes - model.table_bytes + kv_bytes
    return {
        "step ms": statistics.median(times),
        "floor ms": read / profiled.bench.bandwidth() * 1e3,
        "thread's CPU ms": cpu_s / len(times) * 1e3,
        "phases ms": {str(phase): ms for phase, ms in steps.phase_ms.items()},
        "waited, share of steps": steps.num_waited / steps.num_steps,
        "waited, share of time": steps.waiting_share,
    }


def recorded_steps(profiled: Profiled, rows: int) -> dict[str, Any]:
    """Return what the device and CUDA's API did in a step, by PyTorch's profiler."""
    record = profiler()
    with profiled.decoding(rows) as load:
        events, wall_ms = record(partial(load.decode, RECORDED_STEPS))
    return {"step ms": wall_ms / RECORDED_STEPS, **per_step(events)}


def profiler() -> Callable[[Callable[[], Any]], tuple[list[dict[str, Any]], float]]:
    """Return what runs a function and returns its events and milliseconds.

    Raises:
        ImportError: PyTorch is not installed.
    """
    torch = importlib.import_module("torch")

    def record(run: Callable[[], Any]) -> tuple[list[dict[str, Any]], float]:
        mx.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with tempfile.TemporaryDirectory() as folder:
            with torch.profiler.profile(activities=activities) as profile:
                started = time.perf_counter()
                run()
                mx.synchronize()
                milliseconds = (time.perf_counter() - started) * 1e3
            trace = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(trace))
            return json.loads(trace.read_text())["traceEvents"], milliseconds

    return record


def per_step(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return per step: the device's busy and idle milliseconds, and those of kernels and calls."""
    spans = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") in DEVICE_WORK
    )
    busy = idle = long = end = 0.0
    for first, last, _ in spans:
        gap = max(0.0, first - end) if end else 0.0
        idle += gap
        long += gap if gap > LAUNCH_US else 0.0
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    calls = [
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
    ]
    return {
        "busy ms": busy / RECORDED_STEPS / 1e3,
        "idle ms": idle / RECORDED_STEPS / 1e3,
        "of that, waiting for the host": long / RECORDED_STEPS / 1e3,
        "kernels": len(spans) / RECORDED_STEPS,
        "by kernel": _by_name(spans),
        "by call of CUDA": _by_name(calls),
    }


def _by_name(spans: Sequence[tuple[float, float, str]]) -> dict[str, tuple[float, float]]:
    """Return milliseconds and number per step of the longest, by name."""
    micros: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    for first, last, name in spans:
        micros[name[:120]] += last - first
        counts[name[:120]] += 1
    longest = sorted(micros, key=lambda name: -micros[name])[:KERNELS]
    return {n: (micros[n] / RECORDED_STEPS / 1e3, counts[n] / RECORDED_STEPS) for n in longest}


def products(bench: Bench) -> dict[str, Any]:
    """Return by rows: milliseconds of all layers' products in a chain, and of each kind alone."""
    model = bench.model(SHAPE)
    kept = Layers(model)
    flatten(model)
    layers, head = model.model.layers, model.model.lm_head
    kinds = {
        "qkv": [layer.self_attn.q_proj for layer in layers],
        "o": [layer.self_attn.o_proj for layer in layers],
        "gate up": [layer.mlp.gate_proj for layer in layers],
        "down": [layer.mlp.down_proj for layer in layers],
        "head": [head],
    }
    results: dict[str, Any] = {}
    for rows in PRODUCT_ROWS[:: 1 if bench.sizes.is_full else 8]:
        inputs = {
            name: mx.random.normal((rows, 1, modules[0].weight.shape[1])).astype(bench.sizes.dtype)
            for name, modules in kinds.items()
        }
        mx.eval(inputs)
        results[str(rows)] = {
            "chain": median_ms(partial(_chain, layers, inputs["qkv"])),
            **{
                name: median_ms(partial(_outputs, modules, inputs[name]))
                for name, modules in kinds.items()
            },
        }
    kept.restore()
    return results


def _outputs(modules: Sequence[Any], x: mx.array) -> list[mx.array]:
    """Return the products of x, all columns of each."""
    return [module["_product"].take_part(0, x).columns.matrix for module in modules]


def _chain(layers: Sequence[Any], x: mx.array) -> mx.array:
    """Return the last product of all layers, each of which reads the one before.

    Signs keep the values from vanishing; each is a small kernel, as activations are in a model.
    """
    for layer in layers:
        hidden = layer.self_attn.o_proj(mx.sign(layer.self_attn.q_proj(x)))
        x = layer.mlp.down_proj(mx.sign(layer.mlp.gate_proj(hidden)))
    return x


def median_ms(run: Callable[[], Any]) -> float:
    """Return the median milliseconds to evaluate what a call returns; building it is not timed."""
    times = []
    for _ in range(2 + REPEATS):
        result = run()
        started = time.perf_counter()
        mx.eval(result)
        mx.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times[2:])


def attention(sizes: Sizes) -> dict[str, Any]:
    """Return by rows: microseconds of a layer's write and attention, and of attention alone."""
    heads, kv_heads = HEADS["Qwen3-8B"]
    shape = LayerShape(num_kv_heads=kv_heads, key_dim=DIM, value_dim=DIM, dtype=mx.bfloat16)
    backend, results = KernelAttention(BLOCK_SIZE, CudaLanguage()), dict[str, Any]()
    for rows in ATTEND_ROWS:
        layers = attention_layers(backend, shape, heads, rows, sizes.tokens(CONTEXT))
        both, alone = (median_ms(partial(layers.run, writes=writes)) for writes in (True, False))
        results[str(rows)] = {
            "both us": both / layers.count * 1e3,
            "attend us": alone / layers.count * 1e3,
            "GB/s": layers.read_bytes * layers.count / both / 1e6,
        }
    return results


if __name__ == "__main__":
    sys.exit(main())
