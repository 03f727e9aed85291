"""Times attention with several tunings, because no table says which suits a chip."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from mlx_parallm.kernels.language import METAL_TUNINGS, KernelLanguage, Tuning
from mlx_parallm.types.step import ScheduledSequence
from mlx_parallm.worker.attention.base import LayerShape
from mlx_parallm.worker.attention.kernel_backend import KernelAttention
from mlx_parallm.worker.device.faults import MODEL_ERRORS
from mlx_parallm.worker.device.kernels import device_language

BLOCK_SIZE = 16
# SHAPE, HEADS: a layer of an 8B model, with the KV of NUM_ROWS sequences of NUM_KEYS tokens.
SHAPE = LayerShape(num_kv_heads=8, key_dim=128, value_dim=128, dtype=mx.bfloat16)
HEADS = 32
NUM_ROWS, NUM_KEYS = 16, 2048
# NUM_LAUNCHES: launches of a round. NUM_ROUNDS: the fastest round counts.
NUM_LAUNCHES, NUM_ROUNDS = 20, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningTime:
    """A tuning of attention, see ``Tuning``, and its time.

    Attributes:
        is_shipped: True for the tuning that models use.
        launch_us: of one layer's attention of a decode step, 16 rows over 2,048 keys each.
        problem: why it could not be timed; None if it was.
    """

    tile: int
    score_lanes: int
    max_heads: int
    quantised_vector: int
    is_shipped: bool
    launch_us: float = 0.0
    problem: str | None = None

    @property
    def name(self) -> str:
        """Return the tuning as a person would write it."""
        return f"tile {self.tile}, {self.score_lanes} lanes, {self.max_heads} heads"


def time_tunings() -> tuple[TuningTime, ...]:
    """Time the shipped tuning and others on the default device; nothing on a CPU or on CUDA."""
    language = device_language()
    if language is None or language.name != "metal":
        return ()
    return tuple(_timed(language, each) for each in METAL_TUNINGS)


def _timed(language: KernelLanguage, tuning: Tuning) -> TuningTime:
    result = TuningTime(
        tile=tuning.tile,
        score_lanes=tuning.score_lanes,
        max_heads=tuning.max_heads,
        quantised_vector=tuning.quantised_vector,
        is_shipped=tuning == language.tuning,
    )
    try:
        launch_s = _launch_s(KernelAttention(BLOCK_SIZE, language, tuning=tuning))
    except MODEL_ERRORS as cause:
        return replace(result, problem=f"{type(cause).__name__}: {cause}")
    return replace(result, launch_us=launch_s * 1e6)


def _launch_s(backend: KernelAttention) -> float:
    blocks = -(-NUM_KEYS // BLOCK_SIZE)
    pool = backend.new_pool(SHAPE, NUM_ROWS * blocks)
    plan = backend.plan(_rows(blocks))
    queries = mx.random.normal((NUM_ROWS, HEADS, 1, SHAPE.key_dim), SHAPE.dtype)
    scale = SHAPE.key_dim**-0.5

    def launch(count: int) -> None:
        mx.eval(
            [
                backend.attend(pool, plan, queries, scale=scale, window=None, sinks=None)
                for _ in range(count)
            ]
        )

    launch(1)
    rounds_s: list[float] = []
    for _ in range(NUM_ROUNDS):
        start_s = time.perf_counter()
        launch(NUM_LAUNCHES)
        rounds_s.append(time.perf_counter() - start_s)
    return min(rounds_s) / NUM_LAUNCHES


def _rows(blocks: int) -> Sequence[ScheduledSequence]:
    return [
        ScheduledSequence(
            seq_id=row,
            slot=row,
            start=NUM_KEYS - 1,
            token_ids=(1,),
            block_table=tuple(range(row * blocks, (row + 1) * blocks)),
        )
        for row in range(NUM_ROWS)
    ]
