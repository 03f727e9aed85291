"""Images for the clients' requests, drawn without an imaging library."""

from __future__ import annotations

import base64
import struct
import zlib

SIDE = 64
# CENTRE, RADIUS: of the disc, in the left upper part of the image.
CENTRE, RADIUS = 14, 9
COLOURS = {"red": b"\xff\0\0", "blue": b"\0\0\xff"}
WHITE = b"\xff\xff\xff"


def image(colour: str) -> str:
    """Return a PNG file in base64 that shows a disc, as ``demo:see`` was trained to know it."""
    rows = b"".join(
        b"\0" + b"".join(_pixel(colour, x, y) for x in range(SIDE)) for y in range(SIDE)
    )
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    file = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)
    return base64.b64encode(file).decode()


def image_url(colour: str) -> str:
    """Return the same file as a ``data:`` URL."""
    return f"data:image/png;base64,{image(colour)}"


def _pixel(colour: str, x: int, y: int) -> bytes:
    is_inside = (x - CENTRE) ** 2 + (y - CENTRE) ** 2 <= RADIUS**2
    return COLOURS[colour] if is_inside else WHITE


def _chunk(kind: bytes, data: bytes) -> bytes:
    checked = kind + data
    return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))
