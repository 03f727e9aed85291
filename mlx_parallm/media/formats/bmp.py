"""BMP files."""

from __future__ import annotations

from mlx_parallm.media.formats.stored import StoredImage, damaged, read_fields
from mlx_parallm.types.errors import InvalidRequestError

NAME = "BMP"
SIGNATURE = b"BM"
#: Bytes of a header by its version. The oldest has 16-bit sizes and is never compressed.
OLDEST_HEADER = 12
HEADERS = frozenset({OLDEST_HEADER, 40, 52, 56, 64, 108, 124})
DEPTHS = frozenset({1, 4, 8, 16, 24, 32})
#: Run lengths are expanded by Pillow in Python, which takes seconds.
RUN_LENGTHS = frozenset({1, 2})
UNCOMPRESSED, BIT_FIELDS = 0, 3


def read_bmp(data: bytes) -> StoredImage:
    """Return what a BMP file contains.

    Raises:
        InvalidRequestError: it is damaged or compressed.
    """
    pixels, header = read_fields("<II", data, 10, NAME)
    if header not in HEADERS:
        raise damaged(NAME)
    compression = UNCOMPRESSED
    if header == OLDEST_HEADER:
        width, height, _, depth = read_fields("<HHHH", data, 18, NAME)
    else:
        width, height, _, depth, compression = read_fields("<iiHHI", data, 18, NAME)
    if compression in RUN_LENGTHS:
        raise InvalidRequestError("This is a BMP with run-length encoding, which is unsupported.")
    if depth not in DEPTHS or width < 0 or compression not in (UNCOMPRESSED, BIT_FIELDS):
        raise damaged(NAME)
    # A negative height says that the first row is the top one.
    height = abs(height)
    row_bytes = (width * depth + 7) // 8
    padded_bytes = (row_bytes + 3) // 4 * 4
    # Some writers leave out the padding of the last row.
    if pixels + padded_bytes * (height - 1) + row_bytes > len(data):
        raise damaged(NAME)
    return StoredImage("bmp", width, height, data)
