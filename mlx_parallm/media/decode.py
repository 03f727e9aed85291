"""Files to pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from mlx_parallm.media.formats.sniffing import read_file
from mlx_parallm.media.formats.stored import StoredImage
from mlx_parallm.media_limits import MediaLimits
from mlx_parallm.types.errors import InvalidRequestError

#: Decoders by format. ``Image.open`` would try every plugin that is installed.
DECODERS: Mapping[str, Callable[[BytesIO], ImageFile]] = {
    "png": PngImageFile,
    "jpeg": JpegImageFile,
    "webp": WebPImageFile,
    "gif": GifImageFile,
    "bmp": BmpImageFile,
}
# BAND_PIXELS: pixels that are converted at a time, because conversions take copies.
BAND_PIXELS = 1 << 20
WHITE = (255, 255, 255)
# REDUCING_GAP: how much larger than its result an image is at least when it is resampled; what
# is above is reduced by a faster filter first. Pillow's thumbnails take this one.
REDUCING_GAP = 2.0

Pixels = NDArray[np.uint8]


def read_image(data: bytes, limits: MediaLimits) -> StoredImage:
    """Return what a file says about its image, within the limits; no pixel is decoded.

    Raises:
        InvalidRequestError: the file is refused; the message says why.
    """
    limits.check_bytes(len(data))
    image = read_file(data)
    limits.check_pixels(image.width, image.height)
    return image


def decode_image(image: StoredImage) -> Pixels:
    """Return an image's pixels as seen, uint8 [height, width, 3], transparency on white.

    Raises:
        InvalidRequestError: the file is damaged, or there is no memory for its pixels.
    """
    try:
        return _turned(_decode(image), image.orientation)
    except MemoryError as problem:
        raise InvalidRequestError("There is no memory for the image's pixels.") from problem
    except Exception as problem:
        # Decoders raise errors of many classes for damaged files.
        raise InvalidRequestError(
            f"The {image.format.upper()} file is truncated or damaged."
        ) from problem


def shrunk(pixels: Pixels, side: int) -> Pixels:
    """Return an image with its sides in proportion, none longer than ``side``."""
    height, width, _ = pixels.shape
    if max(height, width) <= side:
        return pixels
    image = Image.fromarray(pixels)
    size = shrunk_size(width, height, side)
    return np.asarray(image.resize(size, Image.Resampling.BICUBIC, reducing_gap=REDUCING_GAP))


def shrunk_size(width: int, height: int, side: int) -> tuple[int, int]:
    """Return width and height in proportion, none longer than ``side`` and none 0."""
    scale = min(1.0, side / max(width, height))
    return max(1, round(width * scale)), max(1, round(height * scale))


def _decode(image: StoredImage) -> Pixels:
    """Return the pixels as stored."""
    with DECODERS[image.format](BytesIO(image.content)) as opened:
        if opened.size != (image.width, image.height):
            raise ValueError("The decoder reads another size than was checked.")
        opened.load()
        return _to_rgb(opened)


def _to_rgb(image: Image.Image) -> Pixels:
    """Return the pixels of an image, converted in bands of rows."""
    width, height = image.size
    pixels = np.empty((height, width, 3), np.uint8)
    num_rows = max(1, BAND_PIXELS // width)
    for top in range(0, height, num_rows):
        bottom = min(height, top + num_rows)
        band = image.crop((0, top, width, bottom))
        pixels[top:bottom] = np.asarray(_on_white(band))
    return pixels


def _on_white(image: Image.Image) -> Image.Image:
    """Return the image in RGB; what is transparent shows white."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    colours = image.convert("RGBA")
    opaque = Image.new("RGB", image.size, WHITE)
    opaque.paste(colours, mask=colours.getchannel("A"))
    return opaque


def _turned(pixels: Pixels, orientation: int) -> Pixels:
    """Return pixels as seen: EXIF's orientations 5 to 8 exchange rows and columns."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)
