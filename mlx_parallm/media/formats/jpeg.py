"""JPEG files."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mlx_parallm.media.formats.exif import PREFIX, orientation_of
from mlx_parallm.media.formats.stored import StoredImage, damaged, read_fields, too_many_parts

NAME = "JPEG"
SIGNATURE = b"\xff\xd8\xff"
START = SIGNATURE[:2]
END_MARKER, SCAN_MARKER = 0xD9, 0xDA
END = bytes([0xFF, END_MARKER])
# JFIF and Adobe say which colours the components are.
JFIF_MARKER, EXIF_MARKER, ADOBE_MARKER = 0xE0, 0xE1, 0xEE
COMMENT_MARKER = 0xFE
#: These markers begin frames of baseline, extended and progressive JPEG.
FRAME_MARKERS = frozenset({0xC0, 0xC1, 0xC2})
#: Markers without a length, which do not occur between segments.
BARE_MARKERS = frozenset({0x01, *range(0xD0, 0xD9)})
# MAX_SEGMENTS: a profile or a preview of 20 MB takes 320 segments; fill bytes and stray ones are
# as limited.
MAX_SEGMENTS = 2000
# MAX_SCANS: progressive files have about ten. A scan of 20 bytes can make the decoder visit every
# pixel once more.
MAX_SCANS = 32
# A marker in compressed data is 0xFF and a byte that is no stuffed zero, no restart and no fill.
_NEXT_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")


def read_jpeg(data: bytes) -> StoredImage:
    """Return what a JPEG file contains, up to the end of its first image.

    Raises:
        InvalidRequestError: it is damaged, or has too many segments or scans.
    """
    kept, size, num_scans = [START], (0, 0), 0
    orientation: int | None = None
    for number, (marker, begin, end) in enumerate(_segments(data)):
        num_scans += marker == SCAN_MARKER
        if number > MAX_SEGMENTS or num_scans > MAX_SCANS:
            raise too_many_parts(NAME)
        if marker in FRAME_MARKERS:
            _, height, width = read_fields(">BHH", data, begin + 4, NAME)
            size = width, height
        if marker == EXIF_MARKER and orientation is None and data.startswith(PREFIX, begin + 4):
            orientation = orientation_of(data[begin + 4 : end])
        if _is_kept(marker):
            kept.append(data[begin:end])
    if not num_scans:
        raise damaged(NAME)
    return StoredImage("jpeg", *size, b"".join((*kept, END)), orientation or 1)


def _is_kept(marker: int) -> bool:
    """True if pixels depend on segments with this marker."""
    is_metadata = 0xE0 <= marker <= 0xEF or marker == COMMENT_MARKER
    return marker in (JFIF_MARKER, ADOBE_MARKER) or not is_metadata


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (marker, begin, end) of the segments; a scan's compressed data belong to it.

    Raises:
        InvalidRequestError: the file ends before the image does.
    """
    offset, num_fills = len(START), 0
    while num_fills <= MAX_SEGMENTS:
        begin = offset
        fill, marker = read_fields("BB", data, begin, NAME)
        if fill != 0xFF or marker in (0x00, 0xFF):
            # Fill bytes may precede a marker; decoders skip what else stands there.
            offset, num_fills = offset + 1, num_fills + 1
            continue
        if marker == END_MARKER:
            return
        if marker in BARE_MARKERS:
            raise damaged(NAME)
        offset += 2 + read_fields(">H", data, begin + 2, NAME)[0]
        if marker == SCAN_MARKER:
            following = _NEXT_MARKER.search(data, offset)
            offset = following.start() if following else len(data)
        yield marker, begin, offset
    raise too_many_parts(NAME)
