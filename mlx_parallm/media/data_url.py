"""Pictures within a request: base64, in ``data:`` URLs and by themselves."""

from __future__ import annotations

import binascii
import re

from mlx_parallm.config import MediaLimits
from mlx_parallm.types.errors import InvalidRequestError

SCHEME = "data:"
#: The part of a URL before the comma; other media types and encodings are refused.
_HEADER = re.compile(r"data:image/(?P<subtype>[a-z0-9.+-]+);base64", re.IGNORECASE)
# MAX_HEADER_CHARS: how far a comma is searched.
MAX_HEADER_CHARS = 256
#: Media types that say a format otherwise than by its name.
ALIASES = {"jpg": "jpeg", "pjpeg": "jpeg", "apng": "png", "x-ms-bmp": "bmp", "x-bmp": "bmp"}
NOT_A_DATA_URL = "The URL must have the form data:image/<format>;base64,<data>."


def read_data_url(url: str, limits: MediaLimits) -> tuple[bytes, str]:
    """Return the bytes of a ``data:`` URL, and the format that it says they have.

    Raises:
        InvalidRequestError: it is not a base64 URL of an image, or too long.
    """
    comma = url.find(",", 0, MAX_HEADER_CHARS)
    header = _HEADER.fullmatch(url, 0, comma) if comma > 0 else None
    if header is None:
        raise InvalidRequestError(NOT_A_DATA_URL)
    return read_base64(url[comma + 1 :], limits), format_of(header["subtype"])


def format_of(subtype: str) -> str:
    """Return the format of an image's media subtype."""
    return ALIASES.get(subtype.lower(), subtype.lower())


def read_base64(text: str, limits: MediaLimits) -> bytes:
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
