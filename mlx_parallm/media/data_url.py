"""Images within a request: base64, in ``data:`` URLs and by themselves."""

from __future__ import annotations

import binascii
import re
from urllib.parse import unquote

from mlx_parallm.media_limits import MediaLimits
from mlx_parallm.types.errors import InvalidRequestError

SCHEME = "data:"
# _HEADER: the part of a URL before the comma (RFC 2397). Its media type and parameters are not
# read: clients label images wrongly, and the file's first bytes say what it is.
_HEADER = re.compile(r"data:[^,\r\n]*;base64", re.IGNORECASE)
# MAX_HEADER_CHARS: how far a comma is searched.
MAX_HEADER_CHARS = 256
#: Media types that say a format otherwise than by its name.
ALIASES = {"jpg": "jpeg", "pjpeg": "jpeg", "apng": "png", "x-ms-bmp": "bmp", "x-bmp": "bmp"}
NOT_A_DATA_URL = "The URL must have the form data:image/<format>;base64,<data>."


def read_data_url(url: str, limits: MediaLimits) -> bytes:
    """Return the bytes of a ``data:`` URL.

    Raises:
        InvalidRequestError: it is not a base64 URL, or too long.
    """
    comma = url.find(",", 0, MAX_HEADER_CHARS)
    if comma < 0 or not _HEADER.fullmatch(url, 0, comma):
        raise InvalidRequestError(NOT_A_DATA_URL)
    text = url[comma + 1 :]
    return read_base64(unquote(text, "ascii") if "%" in text else text, limits)


def format_of(media_type: str) -> str:
    """Return the format of an image's media type."""
    subtype = media_type.lower().removeprefix("image/")
    return ALIASES.get(subtype, subtype)


def read_base64(text: str, limits: MediaLimits) -> bytes:
    """Return the bytes of a text in base64, which may have line breaks and lack its padding.

    Raises:
        InvalidRequestError: it is not base64, or too long.
    """
    digits = "".join(text.split()).rstrip("=")
    return read_strict_base64(digits + "=" * (-len(digits) % 4), limits)


def read_strict_base64(text: str, limits: MediaLimits) -> bytes:
    """Return the bytes of a text in base64, without line breaks and with padding.

    Raises:
        InvalidRequestError: it is not base64, or too long.
    """
    limits.check_bytes(len(text) // 4 * 3 - 2)
    # Python's strict mode still takes padding after complete groups.
    is_padded = len(text) % 4 == 0 and not text.endswith("===")
    try:
        if is_padded:
            return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        # Its message could repeat characters of the text.
        pass
    raise InvalidRequestError("The data are not valid base64.")
