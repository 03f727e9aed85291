"""Files of images for tests."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO

import numpy as np
from PIL import Image

FORMATS = ("png", "jpeg", "webp", "gif", "bmp")


def noise(mode: str = "RGB", size: tuple[int, int] = (7, 5), seed: int = 0) -> Image.Image:
    """Return an image of random pixels."""
    num_channels = len(Image.new(mode, (1, 1)).getbands())
    shape = (size[1], size[0], num_channels) if num_channels > 1 else (size[1], size[0])
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    return Image.frombytes(mode, size, pixels.tobytes())


def file_of(image: Image.Image, kind: str = "png", **options: object) -> bytes:
    """Return an image as a file."""
    buffer = BytesIO()
    if kind == "webp":
        options = {"lossless": True, "exact": True, **options}
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def exif_of(orientation: int) -> bytes:
    """Return EXIF metadata."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def png_chunk(kind: bytes, data: bytes = b"") -> bytes:
    """Return a chunk of a PNG file."""
    checksum = zlib.crc32(kind + data).to_bytes(4, "big")
    return len(data).to_bytes(4, "big") + kind + data + checksum


def png_of_size(width: int, height: int, depth: int = 8) -> bytes:
    """Return a PNG file that says this size, with pixels that compress well."""
    header = struct.pack(">IIBBBBB", width, height, depth, 0, 0, 0, 0)
    pixels = zlib.compress(bytes(1_000_000))
    chunks = (png_chunk(b"IHDR", header), png_chunk(b"IDAT", pixels), png_chunk(b"IEND"))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def with_png_chunks(file: bytes, chunks: bytes) -> bytes:
    """Return a PNG file with more chunks, directly after its header."""
    return file[:33] + chunks + file[33:]


def with_jpeg_segments(file: bytes, segments: bytes) -> bytes:
    """Return a JPEG file with more segments, at its beginning."""
    return file[:2] + segments + file[2:]


def gif_of_frames(num_frames: int) -> bytes:
    """Return a GIF file with small frames that differ."""
    frames = [Image.new("P", (2, 2), index % 2) for index in range(num_frames)]
    for frame in frames:
        frame.putpalette([0, 0, 0, 255, 255, 255])
    return file_of(frames[0], "gif", save_all=True, append_images=frames[1:])
