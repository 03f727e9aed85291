"""Limits on the cost of audio files."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_parallm.types.errors import InvalidRequestError

#: ``MOST_CHANNELS``, ``RATES``: what recordings of speech have at most; sampling rates in Hz.
MOST_CHANNELS = 8
RATES = range(4_000, 192_001)


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

    def most_frames(self, max_seconds: float) -> int:
        """Return how many samples of a channel are decoded at most.

        One more than ``max_seconds`` have shows that a file of unknown length is too long.
        """
        return self.num_frames if self.num_frames is not None else int(max_seconds * self.rate) + 1


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
        if form.num_frames is not None:
            self.check_seconds(form.num_frames / form.rate)

    def check_seconds(self, seconds: float) -> None:
        """Refuse a file that lasts too long.

        Raises:
            InvalidRequestError: it does.
        """
        if seconds > self.max_seconds:
            raise InvalidRequestError(
                f"The audio lasts {seconds:.1f} s; at most {self.max_seconds:g} s are taken "
                "(--max-audio-seconds)."
            )
