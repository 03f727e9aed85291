"""FLAC, MP3 and Ogg Vorbis, by the package miniaudio."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np

from mlx_parallm.media.audio.limits import AudioForm
from mlx_parallm.types.errors import InvalidRequestError

EXTRA = "miniaudio"
# BATCH: frames that are decoded at once.
BATCH = 1 << 16


def read_form(data: bytes, kind: str) -> AudioForm:
    """Return what a file says of its samples.

    Args:
        data: the file.
        kind: "flac", "mp3" or "vorbis".

    Raises:
        InvalidRequestError: it is damaged, or the package is not installed.
    """
    library = _library(kind)
    try:
        info = getattr(library, f"{kind}_get_info")(data)
    except library.MiniaudioError as problem:
        raise _damaged(kind) from problem
    return AudioForm(info.sample_rate, info.nchannels, info.num_frames)


def mono(data: bytes, kind: str, form: AudioForm) -> Iterator[np.ndarray]:
    """Yield the samples, float32 from -1 to 1, channels averaged, part by part.

    Raises:
        InvalidRequestError: the file is damaged.
    """
    library = _library(kind)
    try:
        stream = library.stream_memory(
            data,
            output_format=library.SampleFormat.FLOAT32,
            nchannels=form.num_channels,
            sample_rate=form.rate,
            frames_to_read=BATCH,
        )
        for part in stream:
            samples = np.frombuffer(part, np.float32).reshape(-1, form.num_channels)
            yield samples.mean(axis=1, dtype=np.float32)
    except library.MiniaudioError as problem:
        raise _damaged(kind) from problem


def _damaged(kind: str) -> InvalidRequestError:
    return InvalidRequestError(f"The {kind.upper()} file is truncated or damaged.")


def _library(kind: str) -> Any:
    if importlib.util.find_spec(EXTRA) is None:
        raise InvalidRequestError(
            f"This server reads WAV alone; {kind.upper()} needs the package {EXTRA} there "
            "(pip install 'mlx-parallm[audio]')."
        )
    return importlib.import_module(EXTRA)
