"""Files to the samples that speech models hear."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np

from mlx_parallm.media.audio.coded import open_coded
from mlx_parallm.media.audio.limits import AudioForm, AudioLimits
from mlx_parallm.media.audio.resample import resampled
from mlx_parallm.media.audio.wav import read_wav
from mlx_parallm.types.errors import InvalidRequestError

TAKEN = "WAV, FLAC, MP3 and Ogg Vorbis"
CONVERTER = "convert it, as by ffmpeg -i FILE -ar 16000 -ac 1 audio.wav"
# TAG_BYTES, HEAD_BYTES: the header of a tag, and the bytes that show the format.
TAG_BYTES, HEAD_BYTES = 10, 64
# MOST_TAGS: tags that are skipped.
MOST_TAGS = 100
# MP3_SYNC: the first 11 bits of a frame of MPEG audio.
MP3_SYNC = 0xFFE0
#: ``OTHERS``: formats that are recognised so that the error can name them: their first bytes, and
#: where these are.
OTHERS = (
    (4, b"ftyp", "an MP4 or M4A file"),
    (0, b"\x1a\x45\xdf\xa3", "a WebM or Matroska file"),
    (0, b"RF64", "an RF64 file"),
    (0, b"FORM", "an AIFF file"),
    (0, b"\xff\xf1", "an AAC file"),
    (0, b"\xff\xf9", "an AAC file"),
    (0, b"#!AMR", "an AMR file"),
    (0, b"OggS", "an Ogg file without Vorbis, such as Opus"),
    (0, b"PK\x03\x04", "a ZIP archive"),
)


class AudioFile(Protocol):
    """A file whose form is known, and whose samples are not decoded yet."""

    @property
    def form(self) -> AudioForm:
        """Return the form of its samples."""
        ...

    @property
    def num_tolerated(self) -> int:
        """Return how many samples of a channel may be missing."""
        ...

    def mono(self) -> Iterator[np.ndarray]:
        """Yield its samples, float32 from -1 to 1, channels averaged, part by part."""
        ...


def decode_audio(data: bytes, limits: AudioLimits, rate: int) -> np.ndarray:
    """Return a file's samples, float32 ``[n]`` at a rate, its channels averaged.

    Raises:
        InvalidRequestError: it is of a format that is not taken, damaged, or beyond the limits.
        OverloadedError: there was no time to decode it.
    """
    file = _opened(data, limits)
    most = limits.most_frames(file.form)
    samples = resampled(_checked(file, most, limits), file.form.rate, rate, most)
    if not len(samples):
        raise InvalidRequestError("The audio has no samples.")
    return samples


def seconds_of(data: bytes, limits: AudioLimits) -> float:
    """Return how long a file lasts at most, by what it says; raise as ``decode_audio`` does."""
    form = _opened(data, limits).form
    if form.num_frames is None:
        return limits.max_seconds
    return min(limits.max_seconds, form.num_frames / form.rate)


def _checked(file: AudioFile, most: int, limits: AudioLimits) -> Iterator[np.ndarray]:
    """Yield the samples that a file has announced; nothing behind them is decoded.

    Raises:
        InvalidRequestError: a sample is infinite or no number, or they are fewer or too many.
    """
    num_frames = 0
    for part in file.mono():
        if not np.isfinite(part).all():
            raise InvalidRequestError("The audio has samples that are infinite or no numbers.")
        whole = part[: most - num_frames]
        yield np.clip(whole, -1, 1)
        num_frames += len(whole)
        if num_frames == most:
            break
    limits.check(replace(file.form, num_frames=num_frames))
    if num_frames + file.num_tolerated < (file.form.num_frames or 0):
        raise InvalidRequestError("The audio file is truncated or damaged: it ends before it says.")


def _opened(data: bytes, limits: AudioLimits) -> AudioFile:
    """Return a file of a form within the limits."""
    start = _behind_tags(data)
    kind = _kind_of(data, start)
    if kind == "wav":
        file = read_wav(data)
        limits.check(file.form)
        return file
    return open_coded(data, start, kind, limits)


def _behind_tags(data: bytes) -> int:
    """Return where a file begins behind tags (ID3v2), which have sizes of 7 bits a byte."""
    start = 0
    for _ in range(MOST_TAGS):
        if data[start : start + 3] != b"ID3" or len(data) < start + TAG_BYTES:
            break
        size = 0
        for byte in data[start + 6 : start + TAG_BYTES]:
            size = size << 7 | byte & 0x7F
        has_footer = data[start + 5] & 0x10
        start += size + TAG_BYTES * (2 if has_footer else 1)
    return start


def _kind_of(data: bytes, start: int) -> str:
    if data.startswith(b"RIFF") and data[8:12] == b"WAVE":
        return "wav"
    head = data[start : start + HEAD_BYTES]
    if head.startswith(b"fLaC"):
        return "flac"
    if head.startswith(b"OggS") and b"\x01vorbis" in head:
        return "vorbis"
    name = next((name for at, mark, name in OTHERS if head[at : at + len(mark)] == mark), None)
    is_mpeg = int.from_bytes(head[:2], "big") & MP3_SYNC == MP3_SYNC
    if name is None and (is_mpeg or start):
        return "mp3"
    shown = f"This is {name}" if name else "This is no audio file that is known"
    raise InvalidRequestError(f"{shown}; {TAKEN} are taken: {CONVERTER}.")
