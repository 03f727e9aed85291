"""Cuts of a parameter into the parts of several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

#: ``Pieces``: what a rank has of an axis, as ``(start, stop)`` in the order in which it has them.
Pieces = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """A parameter of which every rank has some slices along one axis.

    Attributes:
        shape: the shape of the whole parameter.
        axis: the axis that is cut, negative: counted from the last.
        pieces: the pieces of each rank; ranks may have the same ones, such as heads of keys that
            are fewer than ranks.
    """

    shape: tuple[int, ...]
    axis: int
    pieces: tuple[Pieces, ...]

    def part(self, array: mx.array, rank: int) -> mx.array:
        """Return a rank's part of the whole parameter, which holds no memory of the whole."""
        slices = [array[index] for index in self._indices(array.ndim, rank)]
        return mx.contiguous(slices[0] if len(slices) == 1 else mx.concatenate(slices, self.axis))

    def whole(self, parts: Sequence[mx.array]) -> mx.array:
        """Return the whole parameter of the parts of all ranks."""
        by_start: dict[int, tuple[int, mx.array]] = {}
        for part, pieces in zip(parts, self.pieces, strict=True):
            first = 0
            for start, stop in pieces:
                index = _slice(part.ndim, self.axis, first, first + stop - start)
                by_start[start] = (stop, part[index])
                first += stop - start
        slices, end = [], 0
        for start, (stop, piece) in sorted(by_start.items()):
            assert start == end, f"no rank has {end} to {start} of {self}"
            slices.append(piece)
            end = stop
        return mx.concatenate(slices, self.axis)

    def _indices(self, ndim: int, rank: int) -> list[tuple[slice, ...]]:
        return [_slice(ndim, self.axis, start, stop) for start, stop in self.pieces[rank]]


@dataclass(frozen=True, slots=True)
class FirstOnly:
    """A parameter that rank 0 has whole, while others have zeros.

    It is the bias of a layer whose outputs are added up over the ranks by the block around it.
    """

    shape: tuple[int, ...]

    def part(self, array: mx.array, rank: int) -> mx.array:
        """Return a rank's part of the whole parameter."""
        return array if rank == 0 else mx.zeros_like(array)

    def whole(self, parts: Sequence[mx.array]) -> mx.array:
        """Return the whole parameter of the parts of all ranks."""
        return parts[0]


def host_part(array: NDArray[np.generic], axis: int, pieces: Pieces) -> NDArray[np.generic]:
    """Return pieces of a host array along an axis that counts from the last one."""
    slices = [array[_slice(array.ndim, axis, start, stop)] for start, stop in pieces]
    return slices[0] if len(slices) == 1 else np.concatenate(slices, axis)


def scaled(pieces: Pieces, numerator: int, denominator: int) -> Pieces:
    """Return pieces in another unit, such as numbers instead of packed words."""
    return tuple(
        (start * numerator // denominator, stop * numerator // denominator)
        for start, stop in pieces
    )


def as_pieces(indices: NDArray[np.integer]) -> Pieces:
    """Return ascending runs of indices as pieces."""
    breaks = np.flatnonzero(np.diff(indices) != 1) + 1
    runs = np.split(indices, breaks)
    return tuple((int(run[0]), int(run[-1]) + 1) for run in runs)


def _slice(ndim: int, axis: int, start: int, stop: int) -> tuple[slice, ...]:
    index = [slice(None)] * ndim
    index[axis] = slice(start, stop)
    return tuple(index)
