"""Rows of packed weights: steps and prefill of one engine, against the same with plain weights."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.gpu.bench import Bench, Outcome
from benchmarks.gpu.engines import DECODE_ROOM, BenchEngine, engine_for, random_prompts
from mlx_parallm.bench.decode_load import DecodeLoad
from mlx_parallm.worker.layers.packed import packed_products
from mlx_parallm.worker.layers.packing import AFFINE
from tests.builders.random_models import RandomModel

SLOWEST = "time over that of bf16, at worst, up to 128 rows and in prefill"
OF_MANY_ROWS = "time over that of bf16, at worst, at 256 and 512 rows"
OF_PROMPTS = "time over that of bf16, at worst, in steps of a prompt of 640 to 2,048 tokens"
AT_ONE_ROW = "times as fast as bf16 at one row"
BATCHES, MANY = (1, 8, 32, 128, 256, 512), 256
CONTEXT = 512
# PREFILLED: prompts of PROMPT tokens, TURNS times; the first turn does not count.
PREFILLED, PROMPT, TURNS = 8, 2048, 4
# PROMPTS: tokens of prompts that take one step each, as servers' budgets allow.
PROMPTS = (640, 768, 1024, 1536, 2048)


@dataclass(frozen=True, slots=True)
class _Times:
    """Milliseconds of a step by its rows, of a prompt by its tokens, and of the prefill."""

    steps: dict[int, float]
    prompts: dict[int, float]
    prefill: float
    facts: dict[str, Any]


def against_plain(bench: Bench, *, shape: str, bits: int, mode: str = AFFINE) -> Outcome:
    """Measure steps of 1 to 512 rows, prompts and a prefill with packed weights; bf16 once."""
    plain = bench.once(f"plain {shape}", partial(_times, bench, shape, None, AFFINE))
    packed = _times(bench, shape, bits, mode)
    ratios = {rows: packed.steps[rows] / plain.steps[rows] for rows in packed.steps}
    many = min(MANY, max(ratios))
    few = [ratio for rows, ratio in ratios.items() if rows < many]
    return Outcome(
        {
            SLOWEST: max(*few, packed.prefill / plain.prefill),
            OF_MANY_ROWS: max(ratio for rows, ratio in ratios.items() if rows >= many),
            OF_PROMPTS: max(packed.prompts[each] / plain.prompts[each] for each in packed.prompts),
            AT_ONE_ROW: 1 / ratios[min(ratios)],
        },
        {
            **{f"{rows} rows, ms": step for rows, step in packed.steps.items()},
            **{f"bf16, {rows} rows": step for rows, step in plain.steps.items()},
            **{f"a prompt of {length:,}, ms": each for length, each in packed.prompts.items()},
            **{f"bf16, a prompt of {length:,}": each for length, each in plain.prompts.items()},
            "prefill, ms": packed.prefill,
            "bf16, prefill": plain.prefill,
        },
        packed.facts,
    )


def _times(bench: Bench, shape: str, bits: int | None, mode: str) -> _Times:
    sizes, model = bench.sizes, bench.model(shape, bits, mode)
    batches = sorted({sizes.batch(rows) for rows in BATCHES})
    length, prompt = sizes.tokens(CONTEXT), sizes.tokens(PROMPT)
    kv_tokens = batches[-1] * (length + DECODE_ROOM) + PREFILLED * (prompt + DECODE_ROOM)
    steps: dict[int, float] = {}
    with engine_for(
        model,
        max_num_seqs=batches[-1],
        max_model_len=prompt + DECODE_ROOM,
        kv_tokens=kv_tokens,
    ) as (engine, _):
        for rows in batches:
            load = DecodeLoad(engine.engine, random_prompts(model, [length] * rows, seed=rows))
            load.prefill()
            load.decode(sizes.warm_up)
            steps[rows] = statistics.median(load.decode(sizes.steps * sizes.rounds))
            load.end()
        lengths = sorted({sizes.tokens(length) for length in PROMPTS})
        prompts = {length: _prefill(engine, model, [length]) for length in lengths}
        prefill = _prefill(engine, model, [prompt] * sizes.batch(PREFILLED))
        kinds = packed_products(model.model)
        served = sum(each.kernels is not None for each in kinds)
        facts = {**engine.facts(), "kinds of weights": len(kinds), "with kernels": served}
        return _Times(steps, prompts, prefill, facts)


def _prefill(engine: BenchEngine, model: RandomModel, lengths: list[int]) -> float:
    """Return the milliseconds in which prompts of these lengths are computed."""
    times: list[float] = []
    # Each has prompts of its own, so that none is found in the prefix cache.
    seed = -TURNS * sum(lengths)
    for turn in range(TURNS):
        load = DecodeLoad(engine.engine, random_prompts(model, lengths, seed=seed + turn))
        times.append(sum(load.prefill()))
        load.end()
    return statistics.median(times[1:])
