"""How far batches of texts are padded, so that a device meets few shapes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mlx_parallm.types.shape_buckets import rounded_up
from mlx_parallm.worker.device.properties import backend_name
from mlx_parallm.worker.layers.row_counts import padded_rows

# Lengths between a power of two and the next one.
LENGTHS_PER_OCTAVE = 4
SHORTEST = 8


@dataclass(frozen=True, slots=True)
class ForwardShapes:
    """Which shapes forwards have.

    On CUDA a shape costs more the first time: products of matrices look for an algorithm, and
    attention over long texts is compiled (``numerics.attention.is_fused_compiled``). Elsewhere any
    shape is as good as another, and nothing is padded beyond the longest text.

    Attributes:
        longest: tokens that the model takes, at most.
        are_few: whether to pad.
    """

    longest: int
    are_few: bool

    @classmethod
    def of_device(cls, longest: int) -> ForwardShapes:
        """Those of the device that MLX uses."""
        return cls(longest, are_few=backend_name() == "cuda")

    def length(self, longest: int) -> int:
        """Tokens of each row where the longest text has so many."""
        if not self.are_few:
            return longest
        padded = rounded_up(longest, SHORTEST, 2 * LENGTHS_PER_OCTAVE)
        # A text may have every position that the model knows.
        return max(longest, min(padded, self.longest))

    def rows(self, rows: np.ndarray) -> np.ndarray:
        """Rows of a forward, int ``[B]``, with the last of them again and again behind them."""
        count = padded_rows(len(rows)) if self.are_few else len(rows)
        return np.append(rows, np.full(count - len(rows), rows[-1], rows.dtype))
