"""The speed of sums over ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from mlx_parallm.worker.device.ranks import Ranks

# SMALL_BYTES: a row of hidden states, 4,096 numbers of 16 bits.
SMALL_BYTES = 8 << 10
# LARGE_BYTES: a large tensor of an update.
LARGE_BYTES = 64 << 20
# CHAIN: small sums that wait for each other, as in the forward of 50 layers.
CHAIN = 100
# NUM_RUNS: repetitions of a measurement; the median counts.
NUM_RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Measured sums over all ranks.

    Attributes:
        small_bytes: size of the small array.
        small_us: time of one sum in a chain of them, as in a forward.
        large_bytes: size of the large array.
        large_gb_per_s: size of the large array by the time of its sum.
    """

    small_bytes: int
    small_us: float
    large_bytes: int
    large_gb_per_s: float


def measure_sums(ranks: Ranks) -> Sums:
    """Time sums; all ranks call this together."""

    def chain() -> mx.array:
        x = mx.zeros(SMALL_BYTES // 4)
        for _ in range(CHAIN):
            x = ranks.sum(x)
        return x

    def large() -> mx.array:
        return ranks.sum(mx.zeros(LARGE_BYTES // 4))

    small_s, large_s = _median_s(chain), _median_s(large)
    return Sums(
        small_bytes=SMALL_BYTES,
        small_us=small_s / CHAIN * 1e6,
        large_bytes=LARGE_BYTES,
        large_gb_per_s=LARGE_BYTES / large_s / 1e9,
    )


def _median_s(make: Callable[[], mx.array]) -> float:
    """Return the time until an array is computed; the first one also makes buffers."""
    times: list[float] = []
    for _ in range(1 + NUM_RUNS):
        began = time.perf_counter()
        mx.eval(make())
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])
