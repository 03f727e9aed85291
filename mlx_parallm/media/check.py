"""Check that this installation reads each format of images."""

from __future__ import annotations

from io import BytesIO

from PIL import Image

from mlx_parallm.media.decode import DECODERS, decode_image
from mlx_parallm.media.formats.sniffing import read_file
from mlx_parallm.types.errors import InvalidRequestError

SIZE = (3, 2)


def format_problems() -> dict[str, str | None]:
    """Return by format why its images are not read; None if they are.

    Pillow may have been built without some libraries, so each format is written and read once.
    """
    return {name: _problem(name) for name in DECODERS}


def _problem(name: str) -> str | None:
    data = BytesIO()
    try:
        Image.new("RGB", SIZE, "red").save(data, name)
        pixels = decode_image(read_file(data.getvalue()))
    except (ImportError, KeyError, OSError, InvalidRequestError) as problem:
        # A decoder's own error is the cause of the one that clients get.
        reason = problem.__cause__ or problem
        return f"{type(reason).__name__}: {reason}"
    width, height = SIZE
    is_read = pixels.shape == (height, width, 3) and pixels[0, 0, 0] > 200 > pixels[0, 0, 1]
    return None if is_read else "a red image is read as another one"
