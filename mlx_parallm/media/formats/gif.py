"""GIF files."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_parallm.media.formats.stored import (
    StoredImage,
    check_frames,
    damaged,
    read_fields,
    too_many_parts,
)

NAME = "GIF"
SIGNATURES = (b"GIF87a", b"GIF89a")
TRAILER, EXTENSION, IMAGE = 0x3B, 0x21, 0x2C
GRAPHIC_CONTROL = 0xF9
HEADER_BYTES, DESCRIPTOR_BYTES = 13, 10
# MAX_BLOCKS: a file of 20 MB with full blocks of 255 bytes has 80,000.
MAX_BLOCKS = 300_000


def read_gif(data: bytes) -> StoredImage:
    """Return what a GIF file contains; the content has its first frame alone.

    A file may end early: the decoder says whether the first frame is complete.

    Raises:
        InvalidRequestError: it is damaged, or has too many frames or blocks.
    """
    width, height, flags = read_fields("<HHB", data, 6, NAME)
    first_part = HEADER_BYTES + _palette_bytes(flags)
    kept: list[bytes] = []
    num_frames = 0
    for kind, begin, end in _parts(data, first_part):
        if kind == IMAGE:
            num_frames += 1
            check_frames(num_frames, NAME)
        if num_frames == 1 and kind == IMAGE:
            left, top, columns, rows = read_fields("<HHHH", data, begin + 1, NAME)
            # A frame may be larger than the screen, which then grows.
            width, height = max(width, left + columns), max(height, top + rows)
            kept.append(data[begin:end])
        elif not num_frames and data[begin + 1] == GRAPHIC_CONTROL:
            # Only the last one before the frame applies to it.
            kept = [data[begin:end]]
    if not num_frames:
        raise damaged(NAME)
    return StoredImage("gif", width, height, b"".join((data[:first_part], *kept)))


def _palette_bytes(flags: int) -> int:
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _parts(data: bytes, offset: int) -> Iterator[tuple[int, int, int]]:
    """Yield (kind, begin, end) of extensions and images; the last one may be cut.

    Stray bytes between them are skipped, as decoders do.

    Raises:
        InvalidRequestError: the file has too many blocks.
    """
    num_blocks = 0
    while offset + DESCRIPTOR_BYTES <= len(data):
        begin, kind = offset, data[offset]
        if kind == EXTENSION:
            offset += 2
        elif kind == IMAGE:
            flags = data[begin + DESCRIPTOR_BYTES - 1]
            # One byte with the size of codes is between the palette and the compressed data.
            offset += DESCRIPTOR_BYTES + _palette_bytes(flags) + 1
        elif kind == TRAILER:
            return
        else:
            offset, num_blocks = offset + 1, _counted_block(num_blocks)
            continue
        offset, num_blocks = _skip_blocks(data, offset, num_blocks)
        yield kind, begin, offset


def _skip_blocks(data: bytes, offset: int, num_blocks: int) -> tuple[int, int]:
    """Return the offset behind a sequence of blocks, and the number of blocks up to there."""
    while offset < len(data):
        num_blocks = _counted_block(num_blocks)
        length = data[offset]
        offset += 1 + length
        if not length:
            break
    return offset, num_blocks


def _counted_block(num_blocks: int) -> int:
    if num_blocks == MAX_BLOCKS:
        raise too_many_parts(NAME)
    return num_blocks + 1
