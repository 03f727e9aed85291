"""WebP files."""

from __future__ import annotations

from mlx_parallm.media.formats.exif import MAX_EXIF_BYTES, orientation_of
from mlx_parallm.media.formats.stored import (
    StoredImage,
    check_frames,
    counted,
    damaged,
    read_fields,
)

NAME = "WebP"
RIFF, FOURCC = b"RIFF", b"WEBP"
# A RIFF header, and a chunk's type and length.
HEADER_BYTES, CHUNK_BYTES = 12, 8
#: Types of the first chunk: lossy, lossless, and extended by frames, transparency or metadata.
LOSSY, LOSSLESS, EXTENDED = b"VP8 ", b"VP8L", b"VP8X"
KEPT = frozenset({LOSSY, LOSSLESS, b"ALPH", b"ANIM"})
FRAME = b"ANMF"


def read_webp(data: bytes) -> StoredImage:
    """Return what a WebP file contains; the content has its first frame alone.

    Raises:
        InvalidRequestError: it is damaged, or has too many frames or chunks.
    """
    end_of_file = CHUNK_BYTES + read_fields("<I", data, 4, NAME)[0]
    if end_of_file > len(data):
        raise damaged(NAME)
    kept: list[bytes] = []
    num_frames, orientation, offset = 0, 1, HEADER_BYTES
    chunks = counted(end_of_file, NAME)
    while offset < end_of_file:
        next(chunks)
        (length,) = read_fields("<I", data, offset + 4, NAME)
        kind, begin = data[offset : offset + 4], offset + CHUNK_BYTES
        # Chunks of odd lengths are followed by a byte of padding.
        end = begin + length + length % 2
        if end > end_of_file:
            raise damaged(NAME)
        num_frames += kind == FRAME
        check_frames(num_frames, NAME)
        if kind == EXTENDED:
            kept.append(_without_metadata(data[offset:end]))
        elif kind in KEPT or (kind == FRAME and num_frames == 1):
            kept.append(data[offset:end])
        elif kind == b"EXIF":
            orientation = orientation_of(data[begin : begin + min(length, MAX_EXIF_BYTES)])
        offset = end
    body = FOURCC + b"".join(kept)
    content = RIFF + len(body).to_bytes(4, "little") + body
    return StoredImage("webp", *_read_size(data), content, orientation)


def _without_metadata(chunk: bytes) -> bytes:
    """Return an extended header whose flags promise no colour profile, EXIF or XMP."""
    if len(chunk) <= CHUNK_BYTES:
        raise damaged(NAME)
    flags = chunk[CHUNK_BYTES] & ~0b0010_1100
    return chunk[:CHUNK_BYTES] + bytes([flags]) + chunk[CHUNK_BYTES + 1 :]


def _read_size(data: bytes) -> tuple[int, int]:
    """Return width and height as the first chunk says them."""
    kind, begin = data[HEADER_BYTES : HEADER_BYTES + 4], HEADER_BYTES + CHUNK_BYTES
    if kind == EXTENDED:
        low = read_fields("<HBHB", data, begin + 4, NAME)
        return (low[0] | low[1] << 16) + 1, (low[2] | low[3] << 16) + 1
    if kind == LOSSY:
        width, height = read_fields("<HH", data, begin + 6, NAME)
        return width & 0x3FFF, height & 0x3FFF
    if kind == LOSSLESS:
        (bits,) = read_fields("<I", data, begin + 1, NAME)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    raise damaged(NAME)
