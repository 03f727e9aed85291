"""Conversion of GGUF files with types that MLX lacks: these tensors are quantised in MLX's form.

The package ``gguf`` dequantises them; it is needed for nothing else.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlx_parallm.models.gguf.files import SERVED, read_model
from mlx_parallm.models.gguf.forms import GROUP, Arrays, Bytes, Form, Part, packed_parts
from mlx_parallm.models.gguf.header import TensorInfo
from mlx_parallm.models.gguf.writing import OnShare, weights_of, write_folder
from mlx_parallm.types.errors import ConfigError

#: ``BITS``: bits of a number by type. Types with a scale for 32 numbers keep theirs; others, whose
#: scales are finer or whose numbers are not evenly spaced, get more.
BITS = {
    "Q4_K": 4,
    "Q5_0": 5,
    "Q5_1": 5,
    "Q5_K": 5,
    "Q6_K": 8,
    "Q2_K": 4,
    "Q3_K": 4,
    "IQ1_S": 3,
    "IQ1_M": 3,
    "IQ2_XXS": 4,
    "IQ2_XS": 4,
    "IQ2_S": 4,
    "IQ3_XXS": 4,
    "IQ3_S": 4,
    "IQ4_NL": 5,
    "IQ4_XS": 5,
    "MXFP4": 5,
    "TQ1_0": 2,
    "TQ2_0": 2,
}
#: ``CHOICES``: bits that MLX quantises to.
CHOICES = (2, 3, 4, 5, 6, 8)

#: ``GRIDS``: types whose groups of 32 are evenly spaced, in the bits of ``BITS``.
GRIDS = frozenset({"Q4_K", "Q5_0", "Q5_1", "Q5_K"})
# ROUNDING: the squared relative error of a group that comes from float16 alone.
ROUNDING = 1e-6

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
Dequantise = Callable[[Bytes], Floats]


@dataclass(slots=True)
class Loss:
    """The loss of one tensor.

    Attributes:
        tensor: its place and type in the file.
        bits: of a number, now.
        squares: sum of the squares of its numbers.
        errors: that of the differences.
    """

    tensor: TensorInfo
    bits: int
    squares: float = 0.0
    errors: float = 0.0

    @property
    def relative(self) -> float:
        """The root mean square of the differences, relative to that of the numbers."""
        return math.sqrt(self.errors / self.squares) if self.squares else 0.0


@dataclass(frozen=True, slots=True)
class QuantisedForm:
    """Numbers that are quantised anew.

    Attributes:
        dequantise: returns the numbers of some rows.
        loss: is counted.
    """

    dequantise: Dequantise
    loss: Loss

    def parts(self, shape: tuple[int, ...]) -> list[Part]:
        """Return packed numbers, scales and biases of a tensor of a shape."""
        return packed_parts(shape, self.loss.bits)

    def convert(self, rows: Bytes) -> Arrays:
        """Return these arrays of some rows."""
        exact = self.dequantise(rows).reshape(-1, GROUP)
        loss = self.loss
        numbers, scales, biases = quantised(exact, loss.bits, loss.tensor.type.name in GRIDS)
        loss.squares += float(squares(exact).sum(dtype=np.float64))
        loss.errors += float(errors_of(exact, numbers, scales, biases).sum(dtype=np.float64))
        packed = pack(numbers, loss.bits)
        return [array.reshape(len(rows), -1) for array in (packed, scales, biases)]


def quantised(exact: Floats, bits: int, is_grid: bool) -> tuple[Bytes, Halves, Halves]:
    """Return whole numbers, scales and biases of groups.

    Args:
        exact: the numbers, a row for each group.
        bits: of a whole number.
        is_grid: True if they are evenly spaced within a group. Then the spacing is looked for, so
            that nothing but the rounding of scales and biases to float16 is lost.
    """
    most = (1 << bits) - 1
    numbers, scales, biases = _spread(exact, most)
    if not is_grid:
        return numbers, scales, biases
    error, energy = errors_of(exact, numbers, scales, biases), squares(exact)
    for steps in range(most - 1, 0, -1):
        left = np.flatnonzero(error > ROUNDING * energy)
        if not len(left):
            break
        own = exact[left]
        other = _spread(own, steps)
        errors = errors_of(own, *other)
        better = errors < error[left]
        chosen = left[better]
        error[chosen] = errors[better]
        for kept, new in zip((numbers, scales, biases), other, strict=True):
            kept[chosen] = new[better]
    return numbers, scales, biases


def _spread(exact: Floats, steps: int) -> tuple[Bytes, Halves, Halves]:
    """Return what ``quantised`` does, with a number of steps from the least to the largest."""
    low, high = exact.min(axis=1), exact.max(axis=1)
    scales, biases = ((high - low) / steps).astype("<f2"), low.astype("<f2")
    divisors = np.where(scales > 0, scales, 1).astype(np.float32)
    numbers = exact - biases.astype(np.float32)[:, None]
    numbers /= divisors[:, None]
    np.rint(numbers, out=numbers)
    np.clip(numbers, 0, steps, out=numbers)
    return numbers.astype(np.uint8), scales, biases


def dequantised(numbers: Bytes, scales: Halves, biases: Halves) -> Floats:
    """Return the numbers of groups, as MLX computes them."""
    exact = numbers.astype(np.float32)
    exact *= scales.astype(np.float32)[:, None]
    exact += biases.astype(np.float32)[:, None]
    return exact


def squares(rows: Floats) -> Floats:
    """Return the sum of squares of each row."""
    return np.einsum("ij,ij->i", rows, rows)


def errors_of(exact: Floats, numbers: Bytes, scales: Halves, biases: Halves) -> Floats:
    """Return the squared error of each group."""
    return squares(exact - dequantised(numbers, scales, biases))


def pack(numbers: Bytes, bits: int) -> npt.NDArray[np.uint32]:
    """Return whole numbers one after another, the lowest bit first, in words."""
    flat = numbers.reshape(-1)
    if bits == 8:
        packed = flat
    elif bits == 4:
        packed = flat[0::2] | (flat[1::2] << 4)
    else:
        each = (flat[:, None] >> np.arange(bits, dtype=np.uint8)) & 1
        packed = np.packbits(each, bitorder="little")
    return packed.view("<u4")


@dataclass(frozen=True, slots=True)
class Quantiser:
    """Chooses which tensors are quantised anew.

    Attributes:
        package: the module ``gguf``.
        bits: of a number; None for those of ``BITS``.
        losses: of the tensors that were chosen.
    """

    package: Any
    bits: int | None
    losses: list[Loss] = field(default_factory=list[Loss])

    def form_of(self, tensor: TensorInfo) -> Form | None:
        """Return how a tensor is quantised; None if it stays as it is."""
        name = tensor.type.name
        if name in SERVED:
            return None
        loss = Loss(tensor, self.bits or BITS[name])
        self.losses.append(loss)
        kind = self.package.GGMLQuantizationType[name]
        return QuantisedForm(partial(self.package.quants.dequantize, qtype=kind), loss)


def convert(path: Path, target: Path, bits: int | None, on_share: OnShare) -> list[Loss]:
    """Write a GGUF file as a folder; return what each tensor lost that is quantised anew.

    Args:
        path: the file, or the first of several parts.
        target: the folder, which must not exist.
        bits: of a number that is quantised anew; None for as many as its type needs.
        on_share: called with the share that is written, from 0 to 1.

    Raises:
        ConfigError: the package ``gguf`` is missing.
        ModelLoadError: the file cannot be read, or the folder not be written.
    """
    try:
        package = importlib.import_module("gguf")
    except ImportError as cause:
        raise ConfigError(
            "Files of GGUF are converted by the package gguf: pip install 'mlx-parallm[gguf]'"
        ) from cause
    model = read_model(path, kinds=(*SERVED, *BITS))
    quantiser = Quantiser(package, bits)
    weights = weights_of(model, quantiser.form_of)
    target.mkdir(parents=True)
    write_folder(target, model, weights, on_share)
    return quantiser.losses
