"""Pads batches of texts to few shapes, on devices where each new shape costs time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlx_parallm.types.shape_buckets import padded_rows, rounded_up
from mlx_parallm.worker.device.properties import backend_name

# LENGTHS_PER_OCTAVE: padded lengths between a power of two and the next.
LENGTHS_PER_OCTAVE = 4
SHORTEST = 8


@dataclass(frozen=True, slots=True)
class ForwardShapes:
    """Shape buckets of forwards.

    On CUDA the first forward of a shape is slow: matrix products look for an algorithm, and
    attention over long texts is compiled (``numerics.attention.is_fused_compiled``). Elsewhere
    batches are padded to their longest text only.

    Attributes:
        longest: most tokens that the model takes.
        are_few: True if shapes are rounded up to buckets.
    """

    longest: int
    are_few: bool

    @classmethod
    def of_device(cls, longest: int) -> ForwardShapes:
        """Return the shapes for the device that MLX uses."""
        return cls(longest, are_few=backend_name() == "cuda")

    def length(self, longest: int) -> int:
        """Return the padded length of a batch whose longest text has ``longest`` tokens."""
        if not self.are_few:
            return longest
        padded = rounded_up(longest, SHORTEST, 2 * LENGTHS_PER_OCTAVE)
        # Padding must not go beyond the positions that the model knows.
        return max(longest, min(padded, self.longest))

    def rows(self, rows: np.ndarray) -> np.ndarray:
        """Return a batch's rows, int ``[B]``, padded to a bucket by repeating the last row."""
        count = padded_rows(len(rows)) if self.are_few else len(rows)
        return np.append(rows, np.full(count - len(rows), rows[-1], rows.dtype))
