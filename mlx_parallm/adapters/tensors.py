"""Tensors in host memory, in the layout of their file.

MLX's state is per thread, and uploads are parsed and checked on other threads than the engine's. So
tensors stay NumPy arrays until the engine thread converts them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
R = TypeVar("R")

# MAX_THREADS: more threads would keep the engine thread from running.
MAX_THREADS = 4
# _EXPONENTS: the bits of the exponent; a number with all of them set is infinite or NaN.
_EXPONENTS: dict[str, int] = {
    "bfloat16": 0x7F80,
    "float16": 0x7C00,
    "float32": 0x7F80_0000,
    "float64": 0x7FF0_0000_0000_0000,
}


@dataclass(frozen=True, slots=True, eq=False)
class HostTensor:
    """A tensor in host memory.

    Attributes:
        array: the stored array; nobody may change it.
        is_bfloat16: True if the array's uint16 are the bits of bfloat16, which NumPy lacks.
    """

    array: NDArray[Any]
    is_bfloat16: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of its axes."""
        return self.array.shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.array.ndim

    @property
    def dtype(self) -> str:
        """MLX's name of its dtype."""
        return "bfloat16" if self.is_bfloat16 else self.array.dtype.name

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.array.nbytes

    @classmethod
    def of(cls, array: mx.array) -> HostTensor:
        """Return a copy of an MLX array. Only the engine thread may call it."""
        if array.dtype == mx.bfloat16:
            return cls(_to_numpy(array.view(mx.uint16)), is_bfloat16=True)
        return cls(_to_numpy(array))

    def transposed(self) -> HostTensor:
        """Return a view with the last two axes exchanged."""
        return HostTensor(self.array.swapaxes(-1, -2), self.is_bfloat16)

    def stored(self) -> tuple[memoryview, str]:
        """Return its bytes in memory order, and a name for that order."""
        return self.flat().view(np.uint8).data, "columns" if self._is_turned else "rows"

    def is_finite(self) -> bool:
        """True if no number is infinite or NaN."""
        exponent = _EXPONENTS.get(self.dtype)
        if exponent is None or not self.array.size:
            return True
        bits = self.array.view(f"u{self.array.itemsize}")
        mask = bits.dtype.type(exponent)
        return bool((bits & mask).max() < mask)

    def to_mlx(self) -> mx.array:
        """Return a copy as an MLX array. Only the engine thread may call it."""
        return self.shaped(self.numbers(mx.array(self.flat())))

    def flat(self) -> NDArray[Any]:
        """Return its numbers in memory order, ``[n]``."""
        array = self.array.swapaxes(-1, -2) if self._is_turned else self.array
        return np.ascontiguousarray(array).reshape(-1)

    def numbers(self, flat: mx.array) -> mx.array:
        """Return an MLX copy of ``flat()`` in this tensor's dtype."""
        return flat.view(mx.bfloat16) if self.is_bfloat16 else flat

    def shaped(self, numbers: mx.array) -> mx.array:
        """Return numbers in the order of ``flat()`` in this tensor's shape."""
        if not self._is_turned:
            return mx.reshape(numbers, self.shape)
        return mx.reshape(numbers, self.transposed().shape).swapaxes(-1, -2)

    @property
    def _is_turned(self) -> bool:
        """True if its last two axes are exchanged in memory."""
        flags = self.array.flags
        return (
            self.ndim > 1 and not flags.c_contiguous and self.transposed().array.flags.c_contiguous
        )


def _to_numpy(array: object) -> NDArray[Any]:
    """Return a copy. MLX declares an unknown dtype for it, so the parameter is an object."""
    return np.array(array)


def on_threads(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return ``work(item)`` of each item, in order; useful only if ``work`` releases the GIL."""
    size = -(-len(items) // MAX_THREADS) or 1
    parts = [items[start : start + size] for start in range(0, len(items), size)]

    def work_on(part: Sequence[T]) -> list[R]:
        return [work(item) for item in part]

    with ThreadPoolExecutor(MAX_THREADS, "tensors") as pool:
        return list(itertools.chain.from_iterable(pool.map(work_on, parts)))


def to_mlx(
    tensors: Sequence[HostTensor], dtype: mx.Dtype, scales: Sequence[float] | None = None
) -> list[mx.array]:
    """Return MLX copies of float tensors, times ``scales``. Only the engine thread may call it.

    Tensors of the same dtype and scale are copied together: on CUDA each operation costs a launch,
    and MLX synchronises whenever a host array reuses device memory.
    """
    scales = [1.0] * len(tensors) if scales is None else scales
    groups: dict[tuple[str, float], list[int]] = defaultdict(list)
    for index, (tensor, scale) in enumerate(zip(tensors, scales, strict=True)):
        groups[tensor.dtype, scale].append(index)
    arrays: dict[int, mx.array] = {}
    for (_, scale), members in groups.items():
        flat = [tensors[index].flat() for index in members]
        numbers = tensors[members[0]].numbers(mx.array(np.concatenate(flat)))
        if scale != 1:
            numbers = numbers.astype(mx.float32) * scale
        ends = np.cumsum([array.size for array in flat]).tolist()
        parts = mx.split(numbers.astype(dtype), ends[:-1])
        for index, part in zip(members, parts, strict=True):
            arrays[index] = tensors[index].shaped(part)
    return [arrays[index] for index in range(len(tensors))]


def stacked(tensors: Sequence[HostTensor]) -> HostTensor:
    """Return tensors of one shape and dtype stacked along a new first axis."""
    return HostTensor(np.stack([tensor.array for tensor in tensors]), tensors[0].is_bfloat16)
