"""Tensors in host memory, as they lie in a file.

Uploads are parsed and checked off the engine thread, and MLX's state is per thread: until the
engine thread takes them, tensors are NumPy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

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
        is_turned = self._is_turned
        array = self.array.swapaxes(-1, -2) if is_turned else self.array
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        return raw, "columns" if is_turned else "rows"

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
        is_turned = self._is_turned
        array = self.array.swapaxes(-1, -2) if is_turned else self.array
        copied = mx.array(np.asarray(array, order="C"))
        if self.is_bfloat16:
            copied = copied.view(mx.bfloat16)
        return copied.swapaxes(-1, -2) if is_turned else copied

    @property
    def _is_turned(self) -> bool:
        """Whether it lies in memory with its last two axes exchanged."""
        flags = self.array.flags
        return (
            self.ndim > 1 and not flags.c_contiguous and self.transposed().array.flags.c_contiguous
        )


def stacked(tensors: Sequence[HostTensor]) -> HostTensor:
    """Tensors of one shape and dtype along a new first axis."""
    return HostTensor(np.stack([one.array for one in tensors]), tensors[0].is_bfloat16)
