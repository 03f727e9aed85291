"""An image of a Python program as the bytes of a file. This imports nothing but Python's own."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: ``SCHEMES``: how a text begins that is a URL and no path.
SCHEMES = ("data:", "http://", "https://", "file:")
#: ``DEEP_MODES``: Pillow's modes with more than 8 bits a colour, which it would cut at white.
DEEP_MODES = ("I", "F")
#: The media type of a file by its first bytes.
_MEDIA_TYPES = (
    (b"\x89PNG", "image/png"),
    (b"\xff\xd8", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"RIFF", "image/webp"),
    (b"BM", "image/bmp"),
)


def is_url(image: Any) -> bool:
    """True if an image is given by its URL."""
    return isinstance(image, str) and image.lower().startswith(SCHEMES)


def kind_of(part: Mapping[str, Any]) -> str | None:
    """Return the type of a part of a message; ``{"image": …}`` alone is an image."""
    return part.get("type") or ("image" if "image" in part else None)


def file_bytes(image: Any) -> bytes:
    """Return the file of an image that is given as bytes, a path or a Pillow image.

    Raises:
        ValueError: it is something else, or the path cannot be read.
    """
    if isinstance(image, bytes | bytearray):
        return bytes(image)
    if isinstance(image, str | Path):
        try:
            return Path(image).read_bytes()
        except OSError as problem:
            raise ValueError(f"cannot be read: {problem}") from None
    if callable(getattr(image, "save", None)) and callable(getattr(image, "getbands", None)):
        if image.mode.startswith(DEEP_MODES):
            raise ValueError(f"has more than 8 bits a colour (mode {image.mode}); give 8.")
        content = io.BytesIO()
        is_clear = "A" in image.getbands() or "transparency" in image.info
        image.convert("RGBA" if is_clear else "RGB").save(content, "PNG")
        return content.getvalue()
    raise ValueError(f"has a {type(image).__name__}; give bytes, a path or a Pillow image.")


def image_url(image: Any) -> str:
    """Return an image as a URL: its own, or one with its bytes.

    Raises:
        ValueError: see ``file_bytes``.
    """
    if is_url(image):
        return image
    data = file_bytes(image)
    kinds = (kind for start, kind in _MEDIA_TYPES if data.startswith(start))
    # The server names what is wrong with a file of another kind.
    return f"data:{next(kinds, 'image/png')};base64,{b64encode(data).decode()}"
