"""Decodes a FLAC, MP3 or Ogg Vorbis file, in a process of its own.

The answer is its samples, float32, those of all channels of a frame side by side.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, BinaryIO

# BATCH: frames that are decoded at once.
BATCH = 1 << 14
# DAMAGED: the exit code if the decoder cannot read the file.
DAMAGED = 4


def answer(
    data: bytes, output: BinaryIO, kind: str, num_channels: int, rate: int, most_frames: int
) -> None:
    """Write the samples of a file.

    Args:
        data: the file.
        output: gets the samples.
        kind: "flac", "mp3" or "vorbis".
        num_channels: the file's channels.
        rate: its samples of a channel per second.
        most_frames: samples of a channel behind which nothing is decoded.
    """
    # The server itself never loads it; all of the package miniaudio would take 0.1 s.
    library: Any = importlib.import_module("_miniaudio")
    ffi, lib = library.ffi, library.lib
    config = lib.ma_decoder_config_init(lib.ma_format_f32, num_channels, rate)
    config.encodingFormat = getattr(lib, f"ma_encoding_format_{kind}")
    decoder = ffi.new("ma_decoder *")
    _check(lib, lib.ma_decoder_init_memory(data, len(data), ffi.addressof(config), decoder))
    buffer, num_read = ffi.new("float[]", BATCH * num_channels), ffi.new("ma_uint64 *")
    num_left, is_over = most_frames, False
    while num_left and not is_over:
        wanted = min(BATCH, num_left)
        is_over = _check(lib, lib.ma_decoder_read_pcm_frames(decoder, buffer, wanted, num_read))
        output.write(ffi.buffer(buffer, num_read[0] * num_channels * 4))
        num_left -= num_read[0]
        is_over = is_over or not num_read[0]


def _check(lib: Any, result: int) -> bool:
    """Return True at the end of the file; end the process if it is damaged."""
    if result not in (lib.MA_SUCCESS, lib.MA_AT_END):
        sys.exit(DAMAGED)
    return result == lib.MA_AT_END
