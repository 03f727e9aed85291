"""Another sampling rate, by a windowed sinc (Smith, Digital Audio Resampling, CCRMA)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np

# ZEROS: zero crossings of the sinc to each side, BETA: of the Kaiser window, ROLL_OFF: share of the
# lower Nyquist frequency that stays: what is above does not alias.
ZEROS, BETA, ROLL_OFF = 32, 10.0, 0.945
# LARGEST: the largest term of the ratio of the rates. 44,101 Hz become 44,100 Hz, which nobody
# hears, rather than a table of gigabytes.
LARGEST = 1000
# LEAST_COLUMNS: outputs of one row of a product, so that it is one of matrices.
LEAST_COLUMNS = 64
# BATCH: rows of a product, which take a copy.
BATCH = 4096


def resampled(parts: Iterable[np.ndarray], rate: int, wanted: int) -> np.ndarray:
    """Return samples at another rate, float32, as long as before in seconds.

    Args:
        parts: the samples, one part after the other, of which only the latest is held.
        rate: that of these samples.
        wanted: the other one.
    """
    if rate == wanted:
        return np.concatenate([np.zeros(0, np.float32), *parts])
    ratio = Fraction(wanted, rate).limit_denominator(LARGEST)
    table, step, half = _table(ratio)
    made: list[np.ndarray] = []
    rest, length = np.zeros(half, np.float32), 0
    for part in itertools.chain(parts, [None]):
        # What follows the last sample is silence.
        new = np.zeros(len(table) + step, np.float32) if part is None else part
        length += 0 if part is None else len(part)
        rest = np.concatenate([rest, new])
        num_rows = max(0, (len(rest) - len(table)) // step + 1)
        rows = (
            np.lib.stride_tricks.sliding_window_view(rest, len(table))[::step] if num_rows else ()
        )
        made += [rows[first : first + BATCH] @ table for first in range(0, num_rows, BATCH)]
        rest = rest[num_rows * step :]
    return np.concatenate([row.reshape(-1) for row in made])[: round(length * wanted / rate)]


@functools.lru_cache(8)
def _table(ratio: Fraction) -> tuple[np.ndarray, int, int]:
    """Return the weights of inputs for some outputs, ``[inputs, outputs]``.

    Also by how many inputs the next outputs are later, and how many are before the first output.
    """
    repeat = -(-LEAST_COLUMNS // ratio.numerator)
    num_outputs, step = repeat * ratio.numerator, repeat * ratio.denominator
    width = float(min(1, ratio)) * ROLL_OFF
    half = math.ceil(ZEROS / width)
    inputs = np.arange(-half, step + half + 1)
    distances = inputs[:, None] - np.arange(num_outputs) / float(ratio)
    inside = np.clip(1 - (distances / half) ** 2, 0, None)
    window = np.i0(BETA * np.sqrt(inside)) / np.i0(BETA)
    weights = width * np.sinc(width * distances) * window * (np.abs(distances) < half)
    # A constant stays the same.
    return (weights / weights.sum(axis=0)).astype(np.float32), step, half
