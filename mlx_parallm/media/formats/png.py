"""PNG files."""

from __future__ import annotations

from mlx_parallm.media.formats.exif import MAX_EXIF_BYTES, orientation_of
from mlx_parallm.media.formats.stored import (
    StoredImage,
    check_frames,
    counted,
    damaged,
    read_fields,
)
from mlx_parallm.types.errors import InvalidRequestError

NAME = "PNG"
SIGNATURE = b"\x89PNG\r\n\x1a\n"
# A chunk has its length and type before its data, and a checksum after it.
BEFORE_DATA, AFTER_DATA = 8, 4
#: Chunks that pixels depend on. Others may be compressed texts, or frames of an animation.
KEPT = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"})


def read_png(data: bytes) -> StoredImage:
    """Return what a PNG file contains.

    A file may end early: the decoder says whether the image is complete.

    Raises:
        InvalidRequestError: it is damaged, has 16 bits per channel, or too many chunks.
    """
    kept, orientation = [SIGNATURE], 1
    offset = len(SIGNATURE)
    width, height, depth = _read_header(data)
    for _ in counted(len(data), NAME):
        if offset + BEFORE_DATA > len(data):
            break
        length, *_rest = read_fields(">II", data, offset, NAME)
        kind = data[offset + 4 : offset + BEFORE_DATA]
        begin, end = offset + BEFORE_DATA, offset + BEFORE_DATA + length + AFTER_DATA
        if kind in KEPT:
            kept.append(data[offset:end])
        elif kind == b"eXIf" and end <= len(data):
            orientation = orientation_of(data[begin : begin + min(length, MAX_EXIF_BYTES)])
        elif kind == b"acTL" and end <= len(data):
            check_frames(read_fields(">I", data, begin, NAME)[0], NAME)
        offset = end
        if kind == b"IEND":
            break
    if depth == 16:
        raise InvalidRequestError("This is a PNG with 16 bits per channel; 8 bits are supported.")
    return StoredImage("png", width, height, b"".join(kept), orientation)


def _read_header(data: bytes) -> tuple[int, int, int]:
    """Return width, height and the bits of a channel."""
    length, _, width, height, depth = read_fields(">IIIIB", data, len(SIGNATURE), NAME)
    if data[12:16] != b"IHDR" or length != 13:
        raise damaged(NAME)
    return width, height, depth
