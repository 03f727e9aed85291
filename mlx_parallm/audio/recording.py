"""A recording as a speech model hears it: its features, and windows of them as sources."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np

from mlx_parallm.audio.log_mel import HOP, SAMPLE_RATE, LogMel
from mlx_parallm.audio.windows import WINDOW_FRAMES
from mlx_parallm.types.model_input import HostArray, ModelInput, audio_of

FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A recording.

    Attributes:
        features: float32 ``[frames, mels]``; at least a window.
        num_frames: frames that were recorded; silence is behind them.
        seconds: how long it lasts.
        content: digest of its features.
    """

    features: np.ndarray
    num_frames: int
    seconds: float
    content: bytes

    @property
    def is_long(self) -> bool:
        """True if it is longer than a window."""
        return self.num_frames > WINDOW_FRAMES

    def window(self, first: int) -> ModelInput:
        """Return the source of the window from a frame on; equal recordings give equal sources."""
        rows = self.features[first : first + WINDOW_FRAMES]
        if len(rows) < WINDOW_FRAMES:
            # transformers puts zeros behind the features of a long recording, not silence.
            rows = np.pad(rows, ((0, WINDOW_FRAMES - len(rows)), (0, 0)))
        content = hashlib.blake2b(self.content + b"%d" % first, digest_size=32).hexdigest()
        return audio_of(HostArray("float32", rows.shape, rows.tobytes()), content)


def bytes_of(seconds: float, num_mels: int) -> int:
    """Return the most memory that ``recorded`` holds: the samples and their features."""
    num_samples = math.ceil(seconds * SAMPLE_RATE)
    num_frames = max(WINDOW_FRAMES, num_samples // HOP)
    return FLOAT_BYTES * (num_samples + num_frames * num_mels)


def recorded(samples: np.ndarray, num_mels: int) -> Recording:
    """Return the recording of samples, float32 at ``SAMPLE_RATE``; at least one sample."""
    # The last samples are a frame of their own if they are few, and else in the one before.
    num_frames = max(1, len(samples) // HOP)
    features = LogMel(num_mels).features(samples, max(num_frames, WINDOW_FRAMES))
    digest = hashlib.blake2b(features.data, digest_size=32, salt=b"%d" % num_mels)
    return Recording(features, num_frames, len(samples) / SAMPLE_RATE, digest.digest())
