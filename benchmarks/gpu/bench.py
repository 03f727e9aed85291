"""The objects that the table's rows share: sizes, the current model, and the bandwidth."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import mlx.core as mx

from benchmarks.checks import Check
from mlx_parallm.process_setup.device_process import set_mlx_variables
from mlx_parallm.worker.layers.packing import AFFINE
from tests.builders.random_models import RandomModel, random_model

T = TypeVar("T")

COPIES = 8
COPY_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of all rows; without ``is_full`` they are so small that a CPU needs only seconds.

    Attributes:
        steps: timed in one go.
        warm_up: steps before them.
        rounds: number of turns of a comparison.
    """

    is_full: bool = True
    steps: int = 20
    warm_up: int = 8
    rounds: int = 2

    @classmethod
    def tiny(cls) -> Sizes:
        """Return the smallest sizes."""
        return cls(is_full=False, steps=2, warm_up=1, rounds=1)

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of weights and KV; on a CPU, experts work in float32 only."""
        return mx.bfloat16 if self.is_full else mx.float32

    def shape(self, name: str) -> str:
        """Return the name of a model's shape."""
        if self.is_full:
            return name
        return f"tiny {name}" if name in {"MoE", "hybrid"} else "tiny"

    def tokens(self, count: int) -> int:
        """Return a length."""
        return count if self.is_full else max(8, count // 64)

    def batch(self, count: int) -> int:
        """Return a number of rows, requests or clients."""
        return count if self.is_full else min(count, 4)


@dataclass(frozen=True, slots=True)
class Target:
    """A figure of a row and its target; without ``limit`` it is only information."""

    what: str
    relation: str = ">="
    limit: float | None = None

    def check(self, value: float) -> Check:
        """Return the figure against its target."""
        return Check(self.what, value, self.relation, self.limit)  # type: ignore[arg-type]


@dataclass(slots=True)
class Outcome:
    """The measurements of a row.

    Attributes:
        values: values by the ``what`` of the row's targets.
        figures: figures by the columns of the row's table.
        details: everything else worth keeping.
        missing: why there is not every figure; empty where there is.
    """

    values: dict[str, float] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    missing: str = ""


class Bench:
    """The models and sizes for rows, with one model in memory at a time."""

    def __init__(self, sizes: Sizes) -> None:
        # As in a served process; MLX reads them at its first use of the GPU.
        set_mlx_variables()
        self.sizes = sizes
        self._key: tuple[str, int | None, str] | None = None
        self._model: RandomModel | None = None
        self._bandwidth: float | None = None
        self._measured: dict[str, Any] = {}

    def model(self, shape: str, bits: int | None = None, mode: str = AFFINE) -> RandomModel:
        """Return a random model, made once for consecutive rows that use it."""
        if self._model is None or self._key != (shape, bits, mode):
            self.release()
            self._model = random_model(
                self.sizes.shape(shape), bits=bits, mode=mode, dtype=self.sizes.dtype
            )
            self._key = shape, bits, mode
        return self._model

    def once(self, key: str, measure: Callable[[], T]) -> T:
        """Return a measurement that several rows compare with, made by the first of them."""
        if key not in self._measured:
            self._measured[key] = measure()
        return self._measured[key]

    def release(self) -> None:
        """Free the model."""
        self._key = self._model = None
        gc.collect()
        mx.clear_cache()

    def bandwidth(self) -> float:
        """Return the bytes per second that a large copy reads and writes, measured once."""
        if self._bandwidth is None:
            self._bandwidth = copy_bandwidth(1 << 30 if self.sizes.is_full else 1 << 20)
        return self._bandwidth


Measure = Callable[[Bench], Outcome]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table.

    Attributes:
        name: for the command line and the file of results.
        table: the name of its table.
        what: its first cell.
        measure: runs it.
        targets: its figures, in their order.
    """

    name: str
    table: str
    what: str
    measure: Measure
    targets: tuple[Target, ...] = ()


def copy_bandwidth(num_bytes: int) -> float:
    """Return the best bytes per second of an elementwise operation, reads and writes included."""
    source = mx.ones((num_bytes // 2,), mx.bfloat16)
    mx.eval(source)
    best = float("inf")
    for _ in range(COPY_ROUNDS):
        copies = [mx.negative(source) for _ in range(COPIES)]
        started = time.perf_counter()
        mx.eval(copies)
        best = min(best, time.perf_counter() - started)
        del copies
    mx.clear_cache()
    return COPIES * 2 * source.nbytes / best
