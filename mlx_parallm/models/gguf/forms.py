"""Conversion of the numbers of GGUF tensors to arrays of safetensors, without dequantising.

``Q4_0``, ``Q4_1`` and ``Q8_0`` are what MLX computes with in groups of 32: a scale, a bias and
whole numbers. Only the order of these numbers differs, and whether the bias is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mlx_parallm.models.gguf.tensor_types import FLOATS, PACKED, TensorType

Bytes = npt.NDArray[np.uint8]
Arrays = Sequence[npt.NDArray[Any]]

#: ``GROUP``: numbers that share a scale.
GROUP = 32
# DTYPES: how NumPy calls those of safetensors. It has no bfloat16, whose bits are kept.
DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U32": "<u4"}
# SIGN: what makes signed bytes unsigned.
SIGN = 0x80
# NAN: the bits of a bfloat16 that is not a number.
NAN = 0x7FC0


class Part(NamedTuple):
    """An array that a tensor becomes.

    Attributes:
        leaf: what its name ends with.
        dtype: as safetensors calls it.
        shape: of the array.
    """

    leaf: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size of the array."""
        return prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize


class Form(Protocol):
    """A way to write a tensor."""

    def parts(self, shape: tuple[int, ...]) -> list[Part]:
        """Return the arrays that a tensor of a shape becomes."""
        ...

    def convert(self, rows: Bytes) -> Arrays:
        """Return these arrays of some rows, which are the bytes of the file."""
        ...


@dataclass(frozen=True, slots=True)
class FloatForm:
    """Single numbers.

    Attributes:
        leaf: what the array's name ends with.
        own: their type in the file.
        target: the type that is written.
        offset: what was added to them.
    """

    leaf: str
    own: str
    target: str
    offset: float = 0.0

    def parts(self, shape: tuple[int, ...]) -> list[Part]:
        """Return the array that a tensor of a shape becomes."""
        return [Part(self.leaf, self.target, shape)]

    def convert(self, rows: Bytes) -> Arrays:
        """Return the numbers of some rows."""
        own = np.ascontiguousarray(rows).view(DTYPES[self.own])
        if self.own == self.target and not self.offset:
            return [own]
        exact = (own.astype("<u4") << 16).view("<f4") if self.own == "BF16" else own.astype("<f4")
        exact = exact - np.float32(self.offset)
        return [rounded(exact, self.target)]


def rounded(exact: npt.NDArray[np.float32], target: str) -> npt.NDArray[Any]:
    """Return the nearest numbers of a type."""
    if target != "BF16":
        with np.errstate(over="ignore"):
            return exact.astype(DTYPES[target])
    bits = exact.view("<u4")
    # The even one of two that are as near.
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return np.where(np.isnan(exact), np.uint16(NAN), nearest)


@dataclass(frozen=True, slots=True)
class PackedForm:
    """Numbers that are quantised as MLX does it; ``own`` is their type in the file."""

    own: TensorType

    def parts(self, shape: tuple[int, ...]) -> list[Part]:
        """Return packed numbers, scales and biases of a tensor of a shape."""
        return packed_parts(shape, PACKED[self.own.name])

    def convert(self, rows: Bytes) -> Arrays:
        """Return these arrays of some rows."""
        blocks = np.ascontiguousarray(rows).reshape(-1, self.own.block_bytes)
        # Scales that MLX cannot have are infinite then, which is refused when weights are read.
        with np.errstate(over="ignore", invalid="ignore"):
            packed, scales, biases = UNPACKERS[self.own.name](blocks)
        packed = np.ascontiguousarray(packed).view("<u4")
        return [array.reshape(rows.shape[0], -1) for array in (packed, scales, biases)]


def packed_parts(shape: tuple[int, ...], bits: int) -> list[Part]:
    """Return the three arrays of a quantised layer of MLX."""
    *rows, width = shape
    scales = (*rows, width // GROUP)
    return [
        Part("weight", "U32", (*rows, width * bits // 32)),
        Part("scales", "F16", scales),
        Part("biases", "F16", scales),
    ]


def _halves(blocks: Bytes, place: int) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(blocks[:, 2 * place : 2 * place + 2]).view("<f2")


def _nibbles(quants: Bytes) -> Bytes:
    """Return 32 numbers of 4 bits in order; files have the first half in the low bits."""
    numbers = np.concatenate([quants & 15, quants >> 4], axis=1)
    return (numbers[:, 0::2] | (numbers[:, 1::2] << 4)).astype(np.uint8, copy=False)


def _q4_0(blocks: Bytes) -> Arrays:
    scales = _halves(blocks, 0)
    return _nibbles(blocks[:, 2:]), scales, scales * np.float16(-8)


def _q4_1(blocks: Bytes) -> Arrays:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 1)


def _q8_0(blocks: Bytes) -> Arrays:
    scales = _halves(blocks, 0)
    return blocks[:, 2:] ^ SIGN, scales, scales * np.float16(-SIGN)


UNPACKERS = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}


def form_of(weight: str, kind: TensorType, num_dimensions: int, dtype: str, offset: float) -> Form:
    """Return the form of a weight of a type that is served.

    Args:
        weight: its name.
        kind: its type, of ``FLOATS`` or ``PACKED``.
        num_dimensions: that of its shape.
        dtype: of the model, which vectors get.
        offset: what was added to it.
    """
    if kind.name in PACKED:
        return PackedForm(kind)
    # Matrices keep their numbers, since a narrower type would lose some of them.
    target = kind.name if num_dimensions > 1 else dtype
    return FloatForm(weight.rpartition(".")[2], kind.name, target, offset)


def model_dtype(kinds: dict[str, int]) -> str:
    """Return the type that a model computes in, from the bytes of its matrices by type."""
    floats = {name: count for name, count in kinds.items() if name in FLOATS}
    if not floats or kinds.keys() & PACKED.keys():
        # The scales of quantised layers are of this type.
        return "F16"
    return max(floats, key=lambda name: floats[name])
