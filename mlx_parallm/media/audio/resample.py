"""Another sampling rate, by a windowed sinc (Smith, Digital Audio Resampling, CCRMA)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
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
BATCH = 1024


def resampled(parts: Iterable[np.ndarray], rate: int, wanted: int, most: int) -> np.ndarray:
    """Return samples at another rate, float32, as long as before in seconds.

    Args:
        parts: the samples, one part after the other, of which only the latest is held.
        rate: that of these samples.
        wanted: the other one.
        most: how many samples the parts have at most.
    """
    # The system has no memory for what is not written yet, so ``most`` may be far too many.
    made = np.empty(_length(most, rate, wanted), np.float32)
    heard, num_made = _Heard(parts), 0
    for samples in heard if rate == wanted else _converted(heard, Fraction(wanted, rate)):
        end = min(num_made + len(samples), len(made))
        made[num_made:end] = samples[: end - num_made]
        num_made = end
    made.resize(_length(heard.num_samples, rate, wanted), refcheck=False)
    return made


def _length(num_samples: int, rate: int, wanted: int) -> int:
    return round(num_samples * wanted / rate)


class _Heard:
    """Yields parts, and counts their samples."""

    def __init__(self, parts: Iterable[np.ndarray]) -> None:
        self.num_samples = 0
        self._parts = parts

    def __iter__(self) -> Iterator[np.ndarray]:
        for part in self._parts:
            self.num_samples += len(part)
            yield part


def _converted(parts: Iterable[np.ndarray], ratio: Fraction) -> Iterator[np.ndarray]:
    """Yield samples at a rate that is ``ratio`` times as high, and some behind them."""
    table, step, half = _table(ratio.limit_denominator(LARGEST))
    rest = np.zeros(half, np.float32)
    # What follows the last sample is silence.
    for part in itertools.chain(parts, [np.zeros(len(table) + step, np.float32)]):
        rest = np.concatenate([rest, part])
        num_rows = max(0, (len(rest) - len(table)) // step + 1)
        if num_rows:
            rows = np.lib.stride_tricks.sliding_window_view(rest, len(table))[::step]
            for first in range(0, num_rows, BATCH):
                yield (rows[first : first + BATCH] @ table).reshape(-1)
        rest = rest[num_rows * step :]


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
