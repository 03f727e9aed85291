"""Random images for a workload, as PNG files made without an imaging library."""

from __future__ import annotations

import random
import struct
import zlib
from base64 import b64encode
from dataclasses import dataclass

# SIGNATURE, EIGHT_BIT_RGB: see the PNG specification, sections 5.2 and 11.2.1.
SIGNATURE = b"\x89PNG\r\n\x1a\n"
EIGHT_BIT_RGB = (8, 2, 0, 0, 0)
# BLOCK: pixels along each side of a square of one colour: noise in every pixel would make bodies of
# megabytes, which no photograph of this size is.
BLOCK = 16
# MAX_SIDE: longest side of an image.
MAX_SIDE = 16_384


@dataclass(frozen=True, slots=True)
class ImageSize:
    """Width and height in pixels."""

    width: int
    height: int

    @classmethod
    def parse(cls, text: str) -> ImageSize:
        """Parse ``1024x768``.

        Raises:
            ValueError: the text has another form, or a side is out of range.
        """
        width, mark, height = text.lower().partition("x")
        size = cls(int(width), int(height))
        if not mark or not all(1 <= side <= MAX_SIDE for side in (size.width, size.height)):
            raise ValueError(f"{text!r} is no size")
        return size

    def __str__(self) -> str:
        """Return the text that parses to this."""
        return f"{self.width}x{self.height}"


#: ``DEFAULT_SIZE``: that of the figures in benchmarks/results/images.md.
DEFAULT_SIZE = ImageSize(1024, 768)


def random_image_url(source: random.Random, size: ImageSize) -> str:
    """Return an image of squares of random colours, as a ``data:`` URL."""
    return f"data:image/png;base64,{b64encode(random_png(source, size)).decode()}"


def random_png(source: random.Random, size: ImageSize) -> bytes:
    """Return the file of an image of squares of random colours."""
    columns = -(-size.width // BLOCK)
    rows: list[bytes] = []
    for top in range(0, size.height, BLOCK):
        colours = source.randbytes(3 * columns)
        blocks = (colours[place : place + 3] * BLOCK for place in range(0, len(colours), 3))
        # Each row begins with the number of its filter: none.
        row = b"\0" + b"".join(blocks)[: 3 * size.width]
        rows += [row] * min(BLOCK, size.height - top)
    header = struct.pack(">IIBBBBB", size.width, size.height, *EIGHT_BIT_RGB)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"".join(rows), 1)), (b"IEND", b""))
    return SIGNATURE + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    checked = kind + data
    return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))
