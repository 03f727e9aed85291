"""The orientation in EXIF metadata.

Pillow reads all entries of the metadata, which may each refer to all of its bytes: a file of
64 KiB would take hundreds of megabytes. Here only one entry is read.
"""

from __future__ import annotations

import struct

ORIENTATION = 0x0112
SHORT = 3
ENTRY_BYTES = 12
BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}
PREFIX = b"Exif\0\0"
# MAX_EXIF_BYTES: JPEG has no room for more. Chunks of PNG and WebP can be as long as a file, so
# their readers copy no more than this.
MAX_EXIF_BYTES = 65536


def orientation_of(exif: bytes) -> int:
    """Return the orientation, 1 to 8, that EXIF metadata contains; 1 if there is none."""
    tiff = exif.removeprefix(PREFIX)
    order = BYTE_ORDERS.get(tiff[:4])
    try:
        return _find_orientation(tiff, order) if order else 1
    except struct.error:
        return 1


def _find_orientation(tiff: bytes, order: str) -> int:
    (directory,) = struct.unpack_from(order + "I", tiff, 4)
    (num_entries,) = struct.unpack_from(order + "H", tiff, directory)
    for index in range(num_entries):
        offset = directory + 2 + index * ENTRY_BYTES
        tag, kind, count, value = struct.unpack_from(order + "HHIH", tiff, offset)
        if tag == ORIENTATION:
            return value if kind == SHORT and count == 1 and 1 <= value <= 8 else 1
    return 1
