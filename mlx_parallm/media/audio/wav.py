"""WAV files: RIFF with a ``fmt `` and a ``data`` chunk (Microsoft and IBM, 1991)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mlx_parallm.media.audio.limits import AudioForm
from mlx_parallm.types.errors import InvalidRequestError

#: ``PCM``, ``FLOAT``, ``EXTENSIBLE``: tags of formats; the last one has another in its extension.
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
NAMES = {2: "ADPCM", 6: "A-law", 7: "mu-law", 0x11: "ADPCM", 0x31: "GSM", 0x55: "MP3"}
#: ``TYPES``: dtypes of samples by tag and bits; those of 24 bits have none.
TYPES = {
    (PCM, 8): "u1",
    (PCM, 16): "<i2",
    (PCM, 24): "",
    (PCM, 32): "<i4",
    (FLOAT, 32): "<f4",
    (FLOAT, 64): "<f8",
}
# UNKNOWN: such sizes, and 0, stand for one that was not known when the header was written.
UNKNOWN = 0x7FFFF000
# BATCH: frames that are converted at once, because conversions take copies.
BATCH = 1 << 16
# MOST_CHUNKS: chunks of a file.
MOST_CHUNKS = 1000


@dataclass(frozen=True, slots=True)
class WavFile:
    """A file's samples, not converted yet.

    Attributes:
        form: of the samples.
        kind: their dtype; empty for 24 bits.
        data: their bytes, those of all channels of a frame side by side.
    """

    form: AudioForm
    kind: str
    data: memoryview

    @property
    def num_tolerated(self) -> int:
        """Return 0: all samples are there."""
        return 0

    def mono(self) -> Iterator[np.ndarray]:
        """Yield the samples, float32 from -1 to 1, channels averaged, part by part."""
        num_frames = self.form.num_frames or 0
        size = len(self.data) // max(1, num_frames)
        for first in range(0, num_frames, BATCH):
            part = self.data[first * size : (first + BATCH) * size]
            samples = self._converted(part).reshape(-1, self.form.num_channels)
            yield samples.mean(axis=1, dtype=np.float32)

    def _converted(self, part: memoryview) -> np.ndarray:
        if not self.kind:
            low, middle, high = np.frombuffer(part, np.uint8).reshape(-1, 3).T.astype(np.int32)
            # The highest byte has the sign.
            whole = (low | middle << 8 | high << 16) << 8
            return whole.astype(np.float32) / np.float32(1 << 31)
        samples = np.frombuffer(part, self.kind)
        if self.kind == "u1":
            return (samples.astype(np.float32) - 128) / 128
        if samples.dtype.kind == "i":
            return samples.astype(np.float32) / np.float32(1 << (8 * samples.itemsize - 1))
        return samples.astype(np.float32)


def read_wav(data: bytes) -> WavFile:
    """Return what a file contains, without converting its samples.

    Raises:
        InvalidRequestError: it is damaged, or its samples are coded.
    """
    fields: bytes | None = None
    for name, content in _chunks(data):
        if name == b"fmt ":
            fields = bytes(content)
        elif name == b"data":
            if fields is None:
                raise InvalidRequestError("The WAV file has samples before it says their form.")
            return _file_of(fields, content)
    raise InvalidRequestError("The WAV file is truncated or damaged: it has no samples.")


def _chunks(data: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """Yield the names and contents of chunks; a file that was being written has no sizes yet."""
    view, place = memoryview(data), 12
    for _ in range(MOST_CHUNKS):
        if place + 8 > len(data):
            return
        name, size = struct.unpack_from("<4sI", data, place)
        if name == b"data" and (not size or size >= UNKNOWN):
            size = len(data) - place - 8
        if name == b"data" and place + 8 + size > len(data):
            raise InvalidRequestError("The WAV file is truncated: it ends before it says.")
        yield name, view[place + 8 : place + 8 + size]
        place += 8 + size + size % 2


def _file_of(fields: bytes, content: memoryview) -> WavFile:
    if len(fields) < 16:
        raise InvalidRequestError("The WAV file is truncated or damaged.")
    tag, channels, rate, _, size, bits = struct.unpack_from("<HHIIHH", fields)
    if tag == EXTENSIBLE and len(fields) >= 26:
        (tag,) = struct.unpack_from("<H", fields, 24)
    if (tag, bits) not in TYPES:
        name = NAMES.get(tag, f"format {tag} of {bits} bits")
        raise InvalidRequestError(
            f"The WAV file has {name}; PCM of 8 to 32 bits and floating point are taken."
        )
    if channels and size != channels * bits // 8:
        raise InvalidRequestError(
            f"The WAV file is damaged: {channels} channels of {bits} bits in {size} bytes."
        )
    num_frames = len(content) // size if size else 0
    form = AudioForm(rate, channels, num_frames)
    return WavFile(form, TYPES[tag, bits], content[: num_frames * size])
