"""Tensors in host memory, as they lie in a file.

Uploads are parsed and checked off the engine thread, and MLX's state is per thread: until the
engine thread takes them, tensors are NumPy's.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import mlx.core as mx
import numpy as np

T = TypeVar("T")
R = TypeVar("R")

# More would keep the engine's thread from running.
MAX_THREADS = 4
# All bits of the exponent: a number that has them all is infinite or none.
_EXPONENTS: dict[str, int] = {
    "bfloat16": 0x7F80,
    "float16": 0x7C00,
    "float32": 0x7F80_0000,
    "float64": 0x7FF0_0000_0000_0000,
}


@dataclass(frozen=True, slots=True, eq=False)
class HostTensor:
    """One tensor.

    Attributes:
        array: as stored; not to be changed.
        is_bfloat16: whether the array's uint16 are the bits of bfloat16, which NumPy lacks.
    """

    array: np.ndarray
    is_bfloat16: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of its axes."""
        return self.array.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.array.ndim

    @property
    def dtype(self) -> str:
        """MLX's name for it."""
        return "bfloat16" if self.is_bfloat16 else self.array.dtype.name

    @property
    def nbytes(self) -> int:
        """Size of its numbers."""
        return self.array.nbytes

    @classmethod
    def of(cls, array: mx.array) -> HostTensor:
        """A copy of an array of MLX. To be called by the engine thread only."""
        if array.dtype == mx.bfloat16:
            return cls(np.array(array.view(mx.uint16)), is_bfloat16=True)
        return cls(np.array(array))

    def transposed(self) -> HostTensor:
        """The last two axes exchanged; nothing is copied."""
        return HostTensor(self.array.swapaxes(-1, -2), self.is_bfloat16)

    def stored(self) -> tuple[memoryview, str]:
        """Its bytes in the order they have in memory, and a word for that order."""
        return self.flat().view(np.uint8).data, "columns" if self._is_turned else "rows"

    def is_finite(self) -> bool:
        """Whether no number of it is infinite or none; integers never are."""
        exponent = _EXPONENTS.get(self.dtype)
        if exponent is None or not self.array.size:
            return True
        bits = self.array.view(f"u{self.array.itemsize}")
        mask = bits.dtype.type(exponent)
        return bool((bits & mask).max() < mask)

    def to_mlx(self) -> mx.array:
        """An array of MLX with a copy of it. To be called by the engine thread only."""
        return self.shaped(self.numbers(mx.array(self.flat())))

    def flat(self) -> np.ndarray:
        """Its numbers ``[n]`` in the order they have in memory."""
        array = self.array.swapaxes(-1, -2) if self._is_turned else self.array
        return np.ascontiguousarray(array).reshape(-1)

    def numbers(self, flat: mx.array) -> mx.array:
        """What ``flat`` gave, in its dtype."""
        return flat.view(mx.bfloat16) if self.is_bfloat16 else flat

    def shaped(self, numbers: mx.array) -> mx.array:
        """Numbers in the order of ``flat``, in its shape."""
        if not self._is_turned:
            return numbers.reshape(self.shape)
        return numbers.reshape(self.transposed().shape).swapaxes(-1, -2)

    @property
    def _is_turned(self) -> bool:
        """Whether it lies in memory with its last two axes exchanged."""
        flags = self.array.flags
        return (
            self.ndim > 1 and not flags.c_contiguous and self.transposed().array.flags.c_contiguous
        )


def on_threads(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """``work`` of each item, in their order. It pays where work lets other threads run."""
    size = -(-len(items) // MAX_THREADS) or 1
    parts = [items[start : start + size] for start in range(0, len(items), size)]
    with ThreadPoolExecutor(MAX_THREADS, "tensors") as pool:
        done = pool.map(lambda part: [work(item) for item in part], parts)
        return list(itertools.chain.from_iterable(done))


def to_mlx(
    tensors: Sequence[HostTensor], dtype: mx.Dtype, scales: Sequence[float] | None = None
) -> list[mx.array]:
    """Arrays of MLX with copies of floats, times ``scales``. For the engine thread only.

    Those of one dtype and scale are copied at once: on CUDA, MLX waits for all that runs there
    wherever an array of the host's numbers gets memory that the device had before, and every
    operation costs a launch.
    """
    scales = [1.0] * len(tensors) if scales is None else scales
    groups: dict[tuple[str, float], list[int]] = defaultdict(list)
    for index, (one, scale) in enumerate(zip(tensors, scales, strict=True)):
        groups[one.dtype, scale].append(index)
    arrays: dict[int, mx.array] = {}
    for (_, scale), members in groups.items():
        flat = [tensors[index].flat() for index in members]
        numbers = tensors[members[0]].numbers(mx.array(np.concatenate(flat)))
        if scale != 1:
            numbers = numbers.astype(mx.float32) * scale
        ends = np.cumsum([one.size for one in flat]).tolist()
        parts = mx.split(numbers.astype(dtype), ends[:-1])
        for index, part in zip(members, parts, strict=True):
            arrays[index] = tensors[index].shaped(part)
    return [arrays[index] for index in range(len(tensors))]


def stacked(tensors: Sequence[HostTensor]) -> HostTensor:
    """Tensors of one shape and dtype along a new first axis."""
    return HostTensor(np.stack([one.array for one in tensors]), tensors[0].is_bfloat16)
