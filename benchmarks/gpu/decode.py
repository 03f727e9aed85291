"""Decode rows: against ``BatchGenerator``, against the bandwidth floor, sampled, mixed lengths."""

from __future__ import annotations

import statistics
from typing import Any

import mlx.core as mx

from benchmarks.gpu.bench import Bench, Outcome
from benchmarks.gpu.engines import (
    DECODE_ROOM,
    BenchEngine,
    EngineLoad,
    Layers,
    StockLoad,
    engine_for,
    random_prompts,
    summary,
)
from benchmarks.gpu.shapes import RandomModel

RATIO = "times as fast"
SHARE = "share of the floor"
SHARE_WITHOUT_TABLE = "the same without the input embedding"
SLOWER = "step, sampled over greedy"
SPREAD = "step, spread over equal lengths"
HELD = "KV bytes held over tokens in use"
STOCK_MS, OURS_MS = "`BatchGenerator` ms", "`Engine.step` ms"
TOKENS_PER_S, WEIGHTS_GB, PEAK_GB = "tokens/s", "weights GB", "peak GB"
GB = 1e9


def against_stock(
    bench: Bench, *, shape: str, batch: int, context: int = 512, bits: int | None = None
) -> Outcome:
    """Step times of both, taking turns; memory is that of the engine alone."""
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
    """Time to read weights and KV once at the speed of a copy, over the time of a step."""
    sizes, model = bench.sizes, bench.model(shape)
    lengths = [sizes.tokens(context)] * sizes.batch(batch)
    room = lengths[0] + DECODE_ROOM
    with engine_for(
        model,
        max_num_seqs=len(lengths),
        max_model_len=room,
        kv_tokens=sum(lengths) + _room(lengths),
    ) as (engine, _):
        load = _running(bench, engine, model, lengths)
        before = load.tokens_in_use
        ours = load.decode(sizes.steps * sizes.rounds)
        tokens = (before + load.tokens_in_use) / 2
        kv_bytes = tokens * engine.bytes_per_token
        load.end()
        facts = engine.facts()
    ours_s, rate = statistics.median(ours) / 1e3, bench.bandwidth()
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


def sampled(bench: Bench, *, shape: str, batch: int) -> Outcome:
    """Greedy and sampled requests of the same lengths, in turn."""
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
            for kind, asked in (("greedy", None), ("sampled", params)):
                load = _running(bench, engine, model, lengths, asked, seed=turn)
                times[kind] += load.decode(sizes.steps)
                load.end()
        facts = engine.facts()
    greedy, drawn = (statistics.median(times[kind]) for kind in ("greedy", "sampled"))
    return Outcome(
        {SLOWER: drawn / greedy},
        {"greedy ms": greedy, "sampled ms": drawn},
        {kind: summary(found) for kind, found in times.items()} | facts,
    )


def mixed_lengths(bench: Bench, *, shape: str, batch: int, shortest: int, longest: int) -> Outcome:
    """Lengths evenly spread between two, and then all of their mean."""
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
        held = engine.kv_bytes_held / (load.tokens_in_use * engine.bytes_per_token)
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
) -> EngineLoad:
    """Requests that decode and are warm."""
    load = EngineLoad(engine, random_prompts(model, lengths, seed), params_of)
    load.prefill()
    load.decode(bench.sizes.warm_up)
    return load


def _stock_turns(
    bench: Bench,
    model: RandomModel,
    layers: Layers,
    lengths: list[int],
    load: EngineLoad,
    ours: list[float],
) -> list[float]:
    """Step times of ``BatchGenerator``; from the second turn on the engine's join ``ours``."""
    times: list[float] = []
    stock: StockLoad | None = None
    for turn in range(bench.sizes.rounds):
        if turn:
            # What one left in the pipeline is not the other's time.
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
    """Weights, and the most that was in use since the engine was made."""
    return {WEIGHTS_GB: model.loaded.weight_bytes / GB, PEAK_GB: mx.get_peak_memory() / GB}
