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
BATCH = 6000
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
        padded = np.zeros((num_heard - 1) * HOP + FRAME, np.float32)
        _fill(padded, samples, num_samples)
        frames = np.lib.stride_tricks.sliding_window_view(padded, FRAME)[::HOP]
        logs = np.full((num_frames, self.num_mels), np.log10(SILENCE), np.float32)
        window, filters = _window(), mel_filters(self.num_mels)
        for first in range(0, num_heard, BATCH):
            batch = frames[first : first + BATCH]
            power = np.abs(np.fft.rfft(batch * window)) ** 2
            mels = np.maximum(power @ filters, SILENCE)
            logs[first : first + len(batch)] = np.log10(mels)
        return (np.maximum(logs, logs.max() - np.float32(RANGE)) + 4) / 4


def _fill(padded: np.ndarray, samples: np.ndarray, num_samples: int) -> None:
    """Put samples behind half a frame, mirrored at both ends of ``num_samples``."""
    half = FRAME // 2
    whole = len(padded) - half
    padded[half : half + min(len(samples), whole)] = samples[:whole]
    if len(samples) > 1:
        mirrored = samples[1 : half + 1][::-1]
        padded[half - len(mirrored) : half] = mirrored
    # The last frame of a full recording reaches beyond its end.
    behind = len(padded) - half - num_samples
    if behind > 0:
        ends = padded[half + num_samples - 1 - behind : half + num_samples - 1]
        padded[half + num_samples :] = ends[::-1]


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
