"""MP3 files: the frames of MPEG audio, layer III (ISO/IEC 11172-3 and 13818-3)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mlx_parallm.media.audio.limits import AudioForm, AudioLimits
from mlx_parallm.types.errors import InvalidRequestError

# VERSION_1, RATES: the number of the first version, and rates in Hz by the version's number.
VERSION_1 = 3
RATES = {0: (11025, 12000, 8000), 2: (22050, 24000, 16000), VERSION_1: (44100, 48000, 32000)}
# BIT_RATES: kbit/s by index, of version 1, and of the others.
BIT_RATES = (
    (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
)
# HEADER_BYTES: the size of a header.
HEADER_BYTES = 4
# START: the beginning of a frame's header: 11 bits, a version, layer III, a bit rate that is named.
START = re.compile(rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb][\x10-\xef]")
# MOST_STARTS: headers that turn out to be none, as in pictures between frames: looking takes time.
MOST_STARTS = 50_000
# MONO: the mode of one channel.
MONO = 3
# INFO: marks of a first frame without samples, which has a count of frames if the flag HAS_COUNT
# is set.
INFO, HAS_COUNT = (b"Xing", b"Info"), 1


@dataclass(frozen=True, slots=True)
class Frame:
    """The header of a frame.

    Attributes:
        place: where it begins.
        size: bytes of the frame.
        version: of MPEG audio.
        rate: samples of a channel per second.
        num_channels: the channels.
    """

    place: int
    size: int
    version: int
    rate: int
    num_channels: int

    @property
    def num_samples(self) -> int:
        """Return the samples of a channel."""
        return 1152 if self.version == VERSION_1 else 576

    def announced(self, data: bytes) -> int | None:
        """Return the count of frames, if this is a frame of such facts.

        Its mark is behind the header and the side information, which is of zeros.
        """
        is_mono = self.num_channels == 1
        if self.version == VERSION_1:
            at = self.place + HEADER_BYTES + (17 if is_mono else 32)
        else:
            at = self.place + HEADER_BYTES + (9 if is_mono else 17)
        flags = int.from_bytes(data[at + 4 : at + 8], "big")
        if data[at : at + 4] not in INFO or not flags & HAS_COUNT:
            return None
        return int.from_bytes(data[at + 8 : at + 12], "big")


def read_mp3(
    data: bytes, start: int, limits: AudioLimits
) -> tuple[AudioForm, Sequence[memoryview]]:
    """Return the form of a file's samples, and its frames without what is between them.

    Frames are counted, because what a file says of their number may be missing or wrong.

    Args:
        data: the file.
        start: where the frames begin, behind tags.
        limits: the count ends behind them.

    Raises:
        InvalidRequestError: it has no frames, or ends before it says.
    """
    frames = _frames(data, start)
    first = next(frames, None)
    if first is None:
        raise InvalidRequestError(
            "The MP3 file is truncated or damaged: it has no frames of layer III."
        )
    form = AudioForm(first.rate, first.num_channels, None)
    most = limits.most_frames(form) // first.num_samples + 2
    # Where frames are without a gap.
    runs = [[first.place, first.place + first.size]]
    num_frames = 1
    for frame in itertools.islice(frames, most):
        num_frames += 1
        if runs[-1][1] != frame.place:
            runs.append([frame.place, frame.place])
        runs[-1][1] = frame.place + frame.size
    announced = first.announced(data)
    if announced is not None:
        num_frames -= 1
        if announced > num_frames + 1 and num_frames < most:
            raise InvalidRequestError("The MP3 file is truncated: it ends before it says.")
        if announced < num_frames - 1:
            # Files were joined, and the decoder would end where the first one did.
            runs[0][0] += first.size
    form = replace(form, num_frames=num_frames * first.num_samples)
    return form, [memoryview(data)[begin:end] for begin, end in runs]


def _frames(data: bytes, place: int) -> Iterator[Frame]:
    """Yield whole frames of one version and rate; what is between them is skipped."""
    first, starts = None, iter(range(MOST_STARTS))
    while (frame := _next(data, place, first, starts)) is not None:
        yield frame
        first = first or frame
        place = frame.place + frame.size


def _next(data: bytes, place: int, like: Frame | None, starts: Iterator[int]) -> Frame | None:
    """Return the next frame from a place on that is like the first one, if there is one.

    Args:
        data: the file.
        place: where it is expected.
        like: the first frame.
        starts: has an item for each header that may still turn out to be none.
    """
    if like is not None and (frame := _frame(data, place, like)) is not None:
        return frame
    for start in START.finditer(data, place):
        frame = _frame(data, start.start(), like)
        # A header by chance has no other one behind its frame.
        if frame is not None and (
            frame.place + frame.size == len(data)
            or _frame(data, frame.place + frame.size, frame) is not None
        ):
            return frame
        if next(starts, None) is None:
            raise InvalidRequestError("The MP3 file is damaged: it has too much between frames.")
    return None


def _frame(data: bytes, place: int, like: Frame | None) -> Frame | None:
    """Return the frame that begins at a place; None if none does, or it is not whole."""
    header = data[place : place + HEADER_BYTES]
    if len(header) < HEADER_BYTES or START.match(header) is None:
        return None
    version, bit_rate, rate = header[1] >> 3 & 3, header[2] >> 4, header[2] >> 2 & 3
    if rate == len(RATES[version]):
        return None
    hz = RATES[version][rate]
    if like is not None and (version, hz) != (like.version, like.rate):
        return None
    is_first = version == VERSION_1
    bits = 1000 * BIT_RATES[not is_first][bit_rate]
    size = (144 if is_first else 72) * bits // hz + (header[2] >> 1 & 1)
    if place + size > len(data):
        return None
    return Frame(place, size, version, hz, 1 if header[3] >> 6 == MONO else 2)
