"""The format of a file, by its first bytes alone."""

from __future__ import annotations

from collections.abc import Callable

from mlx_parallm.media.formats import bmp, gif, jpeg, png, webp
from mlx_parallm.media.formats.stored import StoredImage
from mlx_parallm.types.errors import InvalidRequestError

TAKEN = "PNG, JPEG, WebP, GIF and BMP"
# TEXT_BYTES: how far into a text a tag is searched.
TEXT_BYTES = 1024
BRANDS = {b"avif": "AVIF", b"avis": "AVIF", b"qt  ": "a QuickTime film"}
HEIC_BRANDS = frozenset({b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"})
#: Formats that are recognised so that the error can name them.
SIGNATURES = (
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
    (b"\xff\x0a", "JPEG XL"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"\0\0\1\0", "ICO"),
    (b"8BPS", "PSD"),
    (b"%PDF-", "PDF"),
)


def read_file(data: bytes) -> StoredImage:
    """Return what an image's file contains, without decoding it.

    Raises:
        InvalidRequestError: the file is not of a format that is taken, or is damaged.
    """
    reader = _reader_of(data)
    if reader is None:
        raise InvalidRequestError(f"{_description(data)} Images may be {TAKEN}.")
    return reader(data)


def _reader_of(data: bytes) -> Callable[[bytes], StoredImage] | None:
    if data.startswith(png.SIGNATURE):
        return png.read_png
    if data.startswith(jpeg.SIGNATURE):
        return jpeg.read_jpeg
    if data.startswith(gif.SIGNATURES):
        return gif.read_gif
    if data.startswith(webp.RIFF) and data[8:12] == webp.FOURCC:
        return webp.read_webp
    return bmp.read_bmp if data.startswith(bmp.SIGNATURE) else None


def _description(data: bytes) -> str:
    """Return a sentence about a file of a format that is not taken."""
    name = _name_of(data)
    return f"This is {name}." if name else "This is not an image."


def _name_of(data: bytes) -> str | None:
    if not data:
        return "an empty file"
    if data[4:8] == b"ftyp":
        brand = data[8:12]
        return "HEIC" if brand in HEIC_BRANDS else BRANDS.get(brand, "a film")
    for signature, name in SIGNATURES:
        if data.startswith(signature):
            return name
    return _name_of_text(data[:TEXT_BYTES].lower())


def _name_of_text(text: bytes) -> str | None:
    if not text.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"<"):
        return None
    if b"<svg" in text:
        return "SVG"
    return "HTML" if b"<html" in text or b"<!doctype html" in text else "XML"
