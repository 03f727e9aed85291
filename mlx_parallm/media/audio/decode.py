"""Files to the samples that speech models hear."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from mlx_parallm.media.audio import coded
from mlx_parallm.media.audio.limits import AudioForm, AudioLimits
from mlx_parallm.media.audio.resample import resampled
from mlx_parallm.media.audio.wav import read_wav
from mlx_parallm.types.errors import InvalidRequestError

TAKEN = "WAV, FLAC, MP3 and Ogg Vorbis"
CONVERTER = "convert it, as by ffmpeg -i FILE -ar 16000 -ac 1 audio.wav"
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


def decode_audio(data: bytes, limits: AudioLimits, rate: int) -> np.ndarray:
    """Return a file's samples, float32 ``[n]`` at a rate, its channels averaged.

    Raises:
        InvalidRequestError: it is of a format that is not taken, damaged, or beyond the limits.
    """
    form, parts = _opened(data, limits)
    samples = resampled(_checked(parts, form), form.rate, rate)
    if not len(samples):
        raise InvalidRequestError("The audio has no samples.")
    return samples


def _checked(parts: Iterable[np.ndarray], form: AudioForm) -> Iterator[np.ndarray]:
    """Yield the samples that a file has announced; nothing behind them is decoded.

    Raises:
        InvalidRequestError: a sample is infinite or no number, or they are fewer by a second.
    """
    num_left = form.num_frames
    for part in parts:
        if not np.isfinite(part).all():
            raise InvalidRequestError("The audio has samples that are infinite or no numbers.")
        yield np.clip(part[:num_left], -1, 1)
        num_left -= min(num_left, len(part))
        if not num_left:
            return
    if num_left > form.rate:
        raise InvalidRequestError("The audio file is truncated: it ends before it says.")


def seconds_of(data: bytes, limits: AudioLimits) -> float:
    """Return how long a file lasts, by what it says; raise as ``decode_audio`` does."""
    form, _ = _opened(data, limits)
    return form.num_frames / form.rate


def _opened(data: bytes, limits: AudioLimits) -> tuple[AudioForm, Iterator[np.ndarray]]:
    """Return the form of a file's samples, and these, which are not decoded yet."""
    kind = _kind_of(data)
    if kind == "wav":
        file = read_wav(data)
        limits.check(file.form)
        return file.form, file.mono()
    form = coded.read_form(data, kind)
    limits.check(form)
    return form, coded.mono(data, kind, form)


def _kind_of(data: bytes) -> str:
    if data.startswith(b"RIFF") and data[8:12] == b"WAVE":
        return "wav"
    if data.startswith(b"fLaC"):
        return "flac"
    if data.startswith(b"OggS") and b"\x01vorbis" in data[:64]:
        return "vorbis"
    name = next((name for at, mark, name in OTHERS if data[at : at + len(mark)] == mark), None)
    is_mpeg = int.from_bytes(data[:2], "big") & MP3_SYNC == MP3_SYNC
    if name is None and (is_mpeg or data.startswith(b"ID3")):
        return "mp3"
    shown = f"This is {name}" if name else "This is no audio file that is known"
    raise InvalidRequestError(f"{shown}; {TAKEN} are taken: {CONVERTER}.")
