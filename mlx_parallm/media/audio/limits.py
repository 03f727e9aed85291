"""Limits on the cost of audio files."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_parallm.types.errors import InvalidRequestError

#: ``MOST_CHANNELS``, ``RATES``: what recordings of speech have at most; sampling rates in Hz.
MOST_CHANNELS = 8
RATES = range(4_000, 192_001)
# SAMPLES_PER_S: samples of all channels per second of the longest recording, which bound the work:
# those of stereo at 96 kHz.
SAMPLES_PER_S = 2 * 96_000
# ROUNDING_S: encoders put so many seconds around a recording at most.
ROUNDING_S = 0.25


@dataclass(frozen=True, slots=True)
class AudioForm:
    """The form of a file's samples, as the file has it.

    Attributes:
        rate: samples of a channel per second.
        num_channels: the channels.
        num_frames: samples of a channel; None if the file does not say.
    """

    rate: int
    num_channels: int
    num_frames: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioLimits:
    """Limits on one file.

    Attributes:
        max_seconds: the longest recording.
    """

    max_seconds: float = 3600.0

    def check(self, form: AudioForm) -> None:
        """Refuse a file by its form, before its samples are decoded.

        Raises:
            InvalidRequestError: it is too long, or has too many channels or an unusual rate.
        """
        if form.rate not in RATES:
            raise InvalidRequestError(
                f"The audio has {form.rate} samples per second; "
                f"{RATES[0]} to {RATES[-1]} are taken."
            )
        if not 1 <= form.num_channels <= MOST_CHANNELS:
            raise InvalidRequestError(
                f"The audio has {form.num_channels} channels; 1 to {MOST_CHANNELS} are taken."
            )
        if form.num_frames is None:
            return
        seconds, num_samples = form.num_frames / form.rate, form.num_frames * form.num_channels
        if seconds > self.max_seconds + ROUNDING_S:
            raise InvalidRequestError(
                f"The audio lasts {seconds:.1f} s; at most {self.max_seconds:g} s are taken "
                "(--max-audio-seconds)."
            )
        if num_samples > self.max_samples:
            raise InvalidRequestError(
                f"The audio has {num_samples} samples in its channels; at most "
                f"{self.max_samples} are taken."
            )

    @property
    def max_samples(self) -> int:
        """Return the most samples of all channels."""
        return int((self.max_seconds + ROUNDING_S) * SAMPLES_PER_S)

    def most_frames(self, form: AudioForm) -> int:
        """Return how many samples of a channel are decoded at most.

        A file of unknown length has one more than may be if it is too long.
        """
        if form.num_frames is not None:
            return form.num_frames
        seconds = self.max_seconds + ROUNDING_S
        return min(int(seconds * form.rate), self.max_samples // form.num_channels) + 1
