"""Rows of packed weights: steps and prefill of one engine, against the same with plain weights."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.gpu.bench import Bench, Outcome
from benchmarks.gpu.engines import DECODE_ROOM, engine_for, random_prompts
from mlx_parallm.bench.decode_load import DecodeLoad
from mlx_parallm.worker.layers.packed import packed_products
from mlx_parallm.worker.layers.packing import AFFINE

SLOWEST = "time over that of bf16, at worst, up to 128 rows and in prefill"
OF_MANY_ROWS = "time over that of bf16, at worst, at 256 and 512 rows"
AT_ONE_ROW = "times as fast as bf16 at one row"
BATCHES, MANY = (1, 8, 32, 128, 256, 512), 256
CONTEXT = 512
# PREFILLED: prompts of PROMPT tokens, TURNS times; the first turn does not count.
PREFILLED, PROMPT, TURNS = 8, 2048, 4


@dataclass(frozen=True, slots=True)
class _Times:
    """Milliseconds of a step by its rows, and of the prefill."""

    steps: dict[int, float]
    prefill: float
    facts: dict[str, Any]


def against_plain(bench: Bench, *, shape: str, bits: int, mode: str = AFFINE) -> Outcome:
    """Measure steps of 1 to 512 rows and a prefill with packed weights, and with bf16 once."""
    plain = bench.once(f"plain {shape}", partial(_times, bench, shape, None, AFFINE))
    packed = _times(bench, shape, bits, mode)
    ratios = {rows: packed.steps[rows] / plain.steps[rows] for rows in packed.steps}
    many = min(MANY, max(ratios))
    few = [ratio for rows, ratio in ratios.items() if rows < many]
    return Outcome(
        {
            SLOWEST: max(*few, packed.prefill / plain.prefill),
            OF_MANY_ROWS: max(ratio for rows, ratio in ratios.items() if rows >= many),
            AT_ONE_ROW: 1 / ratios[min(ratios)],
        },
        {
            **{f"{rows} rows, ms": step for rows, step in packed.steps.items()},
            **{f"bf16, {rows} rows": step for rows, step in plain.steps.items()},
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
        prefills: list[float] = []
        for turn in range(TURNS):
            prompts = random_prompts(model, [prompt] * sizes.batch(PREFILLED), seed=-1 - turn)
            load = DecodeLoad(engine.engine, prompts)
            prefills.append(sum(load.prefill()))
            load.end()
        kinds = packed_products(model.model)
        served = sum(each.kernels is not None for each in kinds)
        facts = {**engine.facts(), "kinds of weights": len(kinds), "with kernels": served}
        return _Times(steps, statistics.median(prefills[1:]), facts)
