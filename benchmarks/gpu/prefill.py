"""Prefill rows: tokens per second of many prompts at once, against ``BatchGenerator``."""

from __future__ import annotations

import statistics

from benchmarks.gpu.bench import Bench, Outcome
from benchmarks.gpu.engines import (
    DECODE_ROOM,
    StockLoad,
    engine_for,
    random_prompts,
)
from mlx_parallm.bench.decode_load import DecodeLoad

RATIO = "times as fast"
STOCK, OURS = "mlx-lm tokens/s", "tokens/s"


def against_stock(
    bench: Bench, *, shape: str, count: int, length: int, bits: int | None = None
) -> Outcome:
    """Measure the time until every prompt has its first token, the median of runs in turn.

    ``BatchGenerator`` prefills 8 prompts at once, its default. With more prompts than that it is
    also timed, once, with all of them at once.
    """
    sizes, model = bench.sizes, bench.model(shape, bits)
    lengths = [sizes.tokens(length)] * sizes.batch(count)
    ours: list[float] = []
    stock: list[float] = []
    together: list[float] = []
    room = lengths[0] + DECODE_ROOM
    with engine_for(model, max_num_seqs=len(lengths), max_model_len=room) as (engine, layers):
        # The first turn compiles and does not count.
        for turn in range(1 + sizes.rounds):
            prompts = random_prompts(model, lengths, seed=turn)
            load = DecodeLoad(engine.engine, prompts)
            ours.append(sum(load.prefill()) / 1e3)
            load.end()
            with layers.stock():
                stock.append(_stock_s(model, prompts, 8))
                if count > 8:
                    together.append(_stock_s(model, prompts, count))
        facts = engine.facts()
    tokens = sum(lengths)
    ours_rate, stock_rate = (tokens / statistics.median(times[1:]) for times in (ours, stock))
    details = {"ours s": ours, "stock s": stock, "stock, all at once, s": together, **facts}
    return Outcome({RATIO: ours_rate / stock_rate}, {STOCK: stock_rate, OURS: ours_rate}, details)


def _stock_s(model, prompts: list[list[int]], prefill_batch: int) -> float:
    load = StockLoad(model, prompts, prefill_batch)
    seconds = load.prefill()
    load.end()
    return seconds
