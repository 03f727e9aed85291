"""Log-mel features of speech (Radford et al., 2022, arXiv:2212.04356, section 2.2)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

#: ``SAMPLE_RATE``: samples per second.
SAMPLE_RATE = 16000
#: ``FRAME``, ``HOP``: samples of a frame, and from one frame to the next.
FRAME, HOP = 400, 160
#: ``FRAMES_PER_S``: frames of a second.
FRAMES_PER_S = SAMPLE_RATE // HOP
# SILENCE: the least power, and RANGE: how far below the loudest a feature may be, in powers of 10.
SILENCE, RANGE = 1e-10, 8.0
# BATCH: frames that are transformed at once, so that hours take no more memory than minutes.
BATCH = 1500
# The mel scale of Slaney's Auditory Toolbox (1998): linear up to 1,000 Hz, then logarithmic.
LINEAR_HZ, LINEAR_MELS, LOG_STEP = 1000.0, 15.0, np.log(6.4) / 27.0


@dataclass(frozen=True, slots=True)
class LogMel:
    """Computes features.

    Attributes:
        num_mels: numbers of a frame.
    """

    num_mels: int

    def features(self, samples: np.ndarray, num_frames: int) -> np.ndarray:
        """Return features float32 ``[num_frames, num_mels]``; behind the samples is silence.

        Args:
            samples: float32 ``[n]`` at ``SAMPLE_RATE``, from -1 to 1.
            num_frames: at least one for every ``HOP`` whole samples.
        """
        num_samples = max(num_frames * HOP, len(samples))
        # Frames behind these have zeros only.
        num_heard = min(num_frames, (len(samples) + FRAME // 2) // HOP + 1)
        logs = np.full((num_frames, self.num_mels), np.log10(SILENCE), np.float32)
        window, filters = _window(), mel_filters(self.num_mels)
        for first in range(0, num_heard, BATCH):
            end = min(first + BATCH, num_heard)
            power = np.abs(np.fft.rfft(_frames(samples, num_samples, first, end) * window)) ** 2
            logs[first:end] = np.log10(np.maximum(power @ filters, SILENCE))
        np.maximum(logs, logs.max() - np.float32(RANGE), out=logs)
        logs += 4
        logs /= 4
        return logs


def _frames(samples: np.ndarray, num_samples: int, first: int, end: int) -> np.ndarray:
    """Return frames ``first`` to ``end - 1``, float32 ``[end - first, FRAME]``.

    The middle of frame n is sample ``n * HOP``. Silence follows the samples up to ``num_samples``,
    and what is before the first and behind that is mirrored.
    """
    half = FRAME // 2
    begin = first * HOP - half
    around = np.zeros((end - 1 - first) * HOP + FRAME, np.float32)
    part = samples[max(0, begin) : begin + len(around)]
    around[max(0, -begin) : max(0, -begin) + len(part)] = part
    if begin < 0:
        mirrored = samples[1 : half + 1][::-1]
        around[half - len(mirrored) : half] = mirrored
    # The last frame of a full recording reaches beyond its end.
    last = num_samples - begin
    behind = len(around) - last
    if behind > 0:
        around[last:] = around[last - 1 - behind : last - 1][::-1]
    return np.lib.stride_tricks.sliding_window_view(around, FRAME)[::HOP]


@functools.cache
def _window() -> np.ndarray:
    """Return a periodic Hann window, float64 ``[FRAME]``."""
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FRAME) / FRAME)


@functools.cache
def mel_filters(num_mels: int) -> np.ndarray:
    """Return triangles of equal area over frequencies, float64 ``[FRAME // 2 + 1, num_mels]``."""
    highest = _mel_of(SAMPLE_RATE / 2)
    edges = _hz_of(np.linspace(0.0, highest, num_mels + 2))
    frequencies = np.linspace(0, SAMPLE_RATE / 2, FRAME // 2 + 1)
    slopes = edges[None, :] - frequencies[:, None]
    widths = np.diff(edges)
    rising, falling = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    triangles = np.maximum(0, np.minimum(rising, falling))
    return triangles * (2.0 / (edges[2:] - edges[:-2]))


def _mel_of(hz: float) -> float:
    return float(LINEAR_MELS + np.log(hz / LINEAR_HZ) / LOG_STEP)


def _hz_of(mels: np.ndarray) -> np.ndarray:
    linear = LINEAR_HZ / LINEAR_MELS * mels
    return np.where(
        mels >= LINEAR_MELS, LINEAR_HZ * np.exp(LOG_STEP * (mels - LINEAR_MELS)), linear
    )
