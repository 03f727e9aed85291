"""Tensors in host memory, in the layout of their file.

MLX's state is per thread, and uploads are parsed and checked on other threads than the engine's. So
tensors stay NumPy arrays until the engine thread converts them (``arrays.py``). Processes without
MLX read and send them too.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
R = TypeVar("R")

# MAX_THREADS: more threads would keep the engine thread from running.
MAX_THREADS = 4
# MAX_SIZES: the product of a shape's sizes, those of 0 left out. NumPy refuses more bytes than an
# address has, even of an array without numbers, and arrays are widened and stacked later on.
MAX_SIZES = 1 << 40
# _EXPONENTS: the bits of the exponent; a number with all of them set is infinite or NaN.
_EXPONENTS: dict[str, int] = {
    "bfloat16": 0x7F80,
    "float16": 0x7C00,
    "float32": 0x7F80_0000,
    "float64": 0x7FF0_0000_0000_0000,
}


def is_too_large(shape: Sequence[int]) -> bool:
    """Return True if no array has the shape, though a size of 0 lets it need no bytes."""
    return math.prod(size for size in shape if size) > MAX_SIZES


@dataclass(frozen=True, slots=True, eq=False)
class HostTensor:
    """A tensor in host memory.

    Attributes:
        array: the stored array; it must not change.
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

    def transposed(self) -> HostTensor:
        """Return a view with the last two axes exchanged."""
        return HostTensor(self.array.swapaxes(-1, -2), self.is_bfloat16)

    def stored(self) -> tuple[memoryview, str]:
        """Return its bytes in memory order, and a name for that order."""
        return self.flat().view(np.uint8).data, "columns" if self.is_turned else "rows"

    def checksum(self) -> str:
        """Return the SHA-256 of its dtype, shape and numbers, in hex."""
        total = hashlib.sha256(f"{self.dtype}{self.shape}\0".encode())
        total.update(self.stored()[0])
        return total.hexdigest()

    def is_finite(self) -> bool:
        """True if no number is infinite or NaN."""
        exponent = _EXPONENTS.get(self.dtype)
        if exponent is None or not self.array.size:
            return True
        bits = self.array.view(f"u{self.array.itemsize}")
        mask = bits.dtype.type(exponent)
        return bool((bits & mask).max() < mask)

    def flat(self) -> NDArray[Any]:
        """Return its numbers in memory order, ``[n]``."""
        array = self.array.swapaxes(-1, -2) if self.is_turned else self.array
        return np.ascontiguousarray(array).reshape(-1)

    @property
    def is_turned(self) -> bool:
        """True if its last two axes are exchanged in memory."""
        flags = self.array.flags
        return (
            self.ndim > 1 and not flags.c_contiguous and self.transposed().array.flags.c_contiguous
        )


def on_threads(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return ``work(item)`` of each item, in order; useful only if ``work`` releases the GIL."""
    size = -(-len(items) // MAX_THREADS) or 1
    parts = [items[start : start + size] for start in range(0, len(items), size)]

    def work_on(part: Sequence[T]) -> list[R]:
        return [work(item) for item in part]

    with ThreadPoolExecutor(MAX_THREADS, "tensors") as pool:
        return list(itertools.chain.from_iterable(pool.map(work_on, parts)))


def stacked(tensors: Sequence[HostTensor]) -> HostTensor:
    """Return tensors of one shape and dtype stacked along a new first axis."""
    return HostTensor(np.stack([tensor.array for tensor in tensors]), tensors[0].is_bfloat16)
