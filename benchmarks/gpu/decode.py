"""Decode rows: against ``BatchGenerator``, against the bandwidth floor, sampled, mixed lengths."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from benchmarks.gpu.bench import Bench, Outcome
from benchmarks.gpu.engines import (
    DECODE_ROOM,
    BenchEngine,
    Layers,
    StockLoad,
    engine_for,
    random_prompts,
    summary,
)
from mlx_parallm.bench.decode_load import DecodeLoad
from mlx_parallm.bench.statistics import percentile
from mlx_parallm.bench.step_times import Span, format_steps, summarise_steps
from mlx_parallm.bench.step_trace import TraceRecorder, write_trace
from tests.builders.random_models import RandomModel

RATIO = "times as fast"
SHARE = "share of the floor"
SHARE_WITHOUT_TABLE = "the same without the input embedding"
SLOWER = "step, sampled over greedy"
SPREAD = "step, spread over equal lengths"
WAITS = "share of steps for which the host waited"
STALL = "step p99 over its median before"
HELD = "KV bytes held over tokens in use"
STOCK_MS, OURS_MS = "`BatchGenerator` ms", "`Engine.step` ms"
TOKENS_PER_S, WEIGHTS_GB, PEAK_GB = "tokens/s", "weights GB", "peak GB"
GB = 1e9
#: ``LATE_ROOM``: tokens that a request may decode beside the prefill of a long prompt.
LATE_ROOM = 4096
# BOUND: limit of steps with a late prompt, in medians before it; slightly longer ones stay below 3.
BOUND = 2.6


def against_stock(
    bench: Bench, *, shape: str, batch: int, context: int = 512, bits: int | None = None
) -> Outcome:
    """Measure step times of both in turns; memory is that of the engine alone."""
    sizes, model = bench.sizes, bench.model(shape, bits)
    lengths = [sizes.tokens(context)] * sizes.batch(batch)
    room = lengths[0] + DECODE_ROOM
    with engine_for(model, max_num_seqs=len(lengths), max_model_len=room) as (engine, layers):
        load = _running(bench, engine, model, lengths)
        ours = load.decode(sizes.steps)
        memory = _memory(model)
        stock = _stock_turns(bench, model, layers, lengths, load, ours)
        load.end()
        facts = engine.facts()
    stock_ms, ours_ms = statistics.median(stock), statistics.median(ours)
    return Outcome(
        {RATIO: stock_ms / ours_ms},
        {
            STOCK_MS: stock_ms,
            OURS_MS: ours_ms,
            TOKENS_PER_S: len(lengths) / ours_ms * 1e3,
            **memory,
        },
        {"stock": summary(stock), "ours": summary(ours), **facts},
    )


def floor(bench: Bench, *, shape: str, batch: int, context: int) -> Outcome:
    """Measure the time to read weights and KV once at copy speed, over the time of a step."""
    model = bench.model(shape)
    rate = bench.bandwidth()
    ours, kv_bytes, facts = _alone(bench, model, batch, context)
    ours_s = statistics.median(ours) / 1e3
    weights = model.loaded.weight_bytes
    floor_s = (weights + kv_bytes) / rate
    return Outcome(
        {
            SHARE: floor_s / ours_s,
            SHARE_WITHOUT_TABLE: (floor_s - model.table_bytes / rate) / ours_s,
        },
        {OURS_MS: ours_s * 1e3, "floor ms": floor_s * 1e3, "copy TB/s": rate / 1e12},
        {"ours": summary(ours), "weight bytes": weights, "KV bytes": kv_bytes, **facts},
    )


def kv_dtype(bench: Bench, *, shape: str, batch: int, context: int, dtype: str) -> Outcome:
    """Measure step times with KV in the weights' dtype, and with KV of another dtype."""
    model = bench.model(shape)
    full, full_bytes, _ = _alone(bench, model, batch, context)
    gc.collect()
    mx.clear_cache()
    small, small_bytes, facts = _alone(bench, model, batch, context, dtype)
    full_ms, small_ms = statistics.median(full), statistics.median(small)
    return Outcome(
        {RATIO: full_ms / small_ms},
        {
            "bf16 KV ms": full_ms,
            f"{dtype} KV ms": small_ms,
            "bf16 KV GB": full_bytes / GB,
            f"{dtype} KV GB": small_bytes / GB,
        },
        {"bf16": summary(full), dtype: summary(small), **facts},
    )


def late_prompt(bench: Bench, *, shape: str, batch: int, prompt: int) -> Outcome:
    """Measure steps before a long prompt and during its prefill, without and with a bound.

    The bound is ``BOUND`` times the median step before. The first of two prompts shows the engine
    what prefill costs and compiles what it needs; the second is measured.
    """
    free = _late(bench, shape, batch, prompt, None)
    median = statistics.median(free.before)
    bound = _late(bench, shape, batch, prompt, BOUND * median)
    return Outcome(
        {STALL: percentile(bound.during, 99) / statistics.median(bound.before)},
        {
            "step before, ms": statistics.median(bound.before),
            "p99 unbounded, ms": percentile(free.during, 99),
            "p99 bounded, ms": percentile(bound.during, 99),
            "prefill unbounded, ms": sum(free.during),
            "prefill bounded, ms": sum(bound.during),
        },
        {
            "before": summary(bound.before),
            "during": summary(bound.during),
            "steps during": bound.steps,
            **bound.facts,
        },
    )


@dataclass(frozen=True, slots=True)
class _Late:
    """Milliseconds of the steps before and during the prefill of a long prompt.

    ``steps`` are those during it: their tokens, and the milliseconds of their phases.
    """

    before: list[float]
    during: list[float]
    steps: list[dict[str, float]]
    facts: dict[str, Any]


def _late(bench: Bench, shape: str, batch: int, prompt: int, stall_ms: float | None) -> _Late:
    sizes, model = bench.sizes, bench.model(shape)
    length = sizes.tokens(prompt)
    lengths = [sizes.tokens(512)] * sizes.batch(batch)
    room = LATE_ROOM if sizes.is_full else DECODE_ROOM
    recorder = TraceRecorder()
    with engine_for(
        model,
        max_num_seqs=len(lengths) + 1,
        max_model_len=length + room,
        kv_tokens=2 * length + sum(lengths) + len(lengths) * room,
        stall_ms=stall_ms,
        tracer=recorder,
        warms_up=True,
    ) as (engine, _):
        load = _running(bench, engine, model, lengths)
        before = load.decode(sizes.steps)
        during: list[float] = []
        for turn in range(2):
            recorder.spans.clear()
            late = DecodeLoad(
                engine.engine, random_prompts(model, [length], seed=1 + turn), name="late"
            )
            during = late.prefill()
            late.end()
        load.end()
        return _Late(before, during, _phases(recorder.spans), engine.facts())


def _phases(spans: Sequence[Span]) -> list[dict[str, float]]:
    """Return the tokens of each step, and the milliseconds of its phases."""
    steps: dict[int, dict[str, float]] = {}
    for span in spans:
        if span.step_id is not None:
            step = steps.setdefault(span.step_id, {"tokens": span.num_tokens})
            step[span.phase.value] = step.get(span.phase.value, 0.0) + 1e3 * span.duration_s
    return list(steps.values())


def timeline(bench: Bench, *, shape: str, batch: int, trace: Path) -> Outcome:
    """Write a Chrome trace of decode steps; measure how often the device had the next step."""
    sizes, model = bench.sizes, bench.model(shape)
    lengths = [sizes.tokens(512)] * sizes.batch(batch)
    recorder = TraceRecorder()
    room = lengths[0] + DECODE_ROOM
    with engine_for(model, max_num_seqs=len(lengths), max_model_len=room, tracer=recorder) as (
        engine,
        _,
    ):
        load = _running(bench, engine, model, lengths)
        times = load.decode(sizes.steps * sizes.rounds)
        load.end()
        facts = engine.facts()
    steps = summarise_steps(recorder.spans, len(times))
    trace.parent.mkdir(exist_ok=True, parents=True)
    write_trace(recorder.spans, trace)
    print(format_steps(steps), flush=True)
    phases = {f"{phase}, ms": value for phase, value in steps.phase_ms.items()}
    waited = steps.num_waited / steps.num_steps
    return Outcome({WAITS: waited}, {OURS_MS: statistics.median(times), **phases}, facts)


def sampled(bench: Bench, *, shape: str, batch: int) -> Outcome:
    """Measure greedy and sampled requests of the same lengths, in turn."""
    sizes, model = bench.sizes, bench.model(shape)
    lengths = [sizes.tokens(512)] * sizes.batch(batch)
    params: list[dict[str, Any]] = [
        {"temperature": 0.8, "top_p": 0.95, "seed": i, "logprobs": 5 if i % 4 == 0 else None}
        for i in range(len(lengths))
    ]
    times: dict[str, list[float]] = {"greedy": [], "sampled": []}
    room = lengths[0] + DECODE_ROOM
    with engine_for(model, max_num_seqs=len(lengths), max_model_len=room) as (engine, _):
        for turn in range(sizes.rounds):
            for kind, options in (("greedy", None), ("sampled", params)):
                load = _running(bench, engine, model, lengths, options, seed=turn)
                times[kind] += load.decode(sizes.steps)
                load.end()
        facts = engine.facts()
    greedy, drawn = (statistics.median(times[kind]) for kind in ("greedy", "sampled"))
    return Outcome(
        {SLOWER: drawn / greedy},
        {"greedy ms": greedy, "sampled ms": drawn},
        {kind: summary(samples) for kind, samples in times.items()} | facts,
    )


def mixed_lengths(bench: Bench, *, shape: str, batch: int, shortest: int, longest: int) -> Outcome:
    """Measure lengths spread evenly between two, and then all of their mean."""
    sizes, model = bench.sizes, bench.model(shape)
    count = sizes.batch(batch)
    low, high = sizes.tokens(shortest), sizes.tokens(longest)
    spread = [low + (high - low) * i // (count - 1) for i in range(count)]
    mean = [round(statistics.fmean(spread))] * count
    with engine_for(
        model,
        max_num_seqs=count,
        max_model_len=high + DECODE_ROOM,
        kv_tokens=max(sum(spread), sum(mean)) + _room(spread),
    ) as (engine, _):
        load = _running(bench, engine, model, spread)
        mixed = load.decode(sizes.steps * sizes.rounds)
        held = engine.kv_bytes_held / (load.num_tokens * engine.bytes_per_token)
        load.end()
        load = _running(bench, engine, model, mean, seed=1)
        equal = load.decode(sizes.steps * sizes.rounds)
        load.end()
        facts = engine.facts()
    mixed_ms, equal_ms = statistics.median(mixed), statistics.median(equal)
    return Outcome(
        {SPREAD: mixed_ms / equal_ms, HELD: held},
        {"spread ms": mixed_ms, "equal ms": equal_ms},
        {"spread": summary(mixed), "equal": summary(equal), "lengths": spread, **facts},
    )


def _running(
    bench: Bench,
    engine: BenchEngine,
    model: RandomModel,
    lengths: list[int],
    params_of: list[dict[str, Any]] | None = None,
    *,
    seed: int = 0,
) -> DecodeLoad:
    """Requests that decode and are warm."""
    load = DecodeLoad(engine.engine, random_prompts(model, lengths, seed), params_of)
    load.prefill()
    load.decode(bench.sizes.warm_up)
    return load


def _alone(
    bench: Bench, model: RandomModel, batch: int, context: int, dtype: str = "auto"
) -> tuple[list[float], float, dict[str, Any]]:
    """Return step times of the engine, and the mean bytes of KV that a step reads."""
    sizes = bench.sizes
    lengths = [sizes.tokens(context)] * sizes.batch(batch)
    with engine_for(
        model,
        max_num_seqs=len(lengths),
        max_model_len=lengths[0] + DECODE_ROOM,
        kv_tokens=sum(lengths) + _room(lengths),
        kv_cache_dtype=dtype,
    ) as (engine, _):
        load = _running(bench, engine, model, lengths)
        before = load.num_tokens
        times = load.decode(sizes.steps * sizes.rounds)
        tokens = (before + load.num_tokens) / 2
        load.end()
        return times, tokens * engine.bytes_per_token, engine.facts()


def _stock_turns(
    bench: Bench,
    model: RandomModel,
    layers: Layers,
    lengths: list[int],
    load: DecodeLoad,
    ours: list[float],
) -> list[float]:
    """Return step times of ``BatchGenerator``; the engine's are added to ``ours``."""
    times: list[float] = []
    stock: StockLoad | None = None
    for turn in range(bench.sizes.rounds):
        if turn:
            # Two steps drain the pipeline, so that one side's work does not count as the other's.
            load.decode(2)
            ours += load.decode(bench.sizes.steps)
        with layers.stock():
            if stock is None:
                stock = StockLoad(model, random_prompts(model, lengths))
                stock.prefill()
                stock.decode(bench.sizes.warm_up)
            stock.decode(2)
            times += stock.decode(bench.sizes.steps)
    if stock is not None:
        stock.end()
    return times


def _room(lengths: list[int]) -> int:
    return len(lengths) * DECODE_ROOM


def _memory(model: RandomModel) -> dict[str, float]:
    """Return the weights' memory, and the peak memory since the engine was created."""
    return {WEIGHTS_GB: model.loaded.weight_bytes / GB, PEAK_GB: mx.get_peak_memory() / GB}
