"""An image's file, taken apart, and what its readers share."""

from __future__ import annotations

import struct
from collections.abc import Generator
from dataclasses import dataclass

from mlx_parallm.types.errors import InvalidRequestError

# MAX_FRAMES: an animation's first frame is used, but counting the others takes time.
MAX_FRAMES = 1000
# MIN_CHUNK_BYTES: mean size from which a file's chunks are believed to hold data. Decoders spend
# microseconds on each, so a file of empty chunks would keep one busy for many seconds.
MIN_CHUNK_BYTES = 1024
# FREE_CHUNKS: any file may have as many chunks as this.
FREE_CHUNKS = 256


@dataclass(frozen=True, slots=True)
class StoredImage:
    """Size, orientation and stored pixels of an image's file.

    Attributes:
        format: "png", "jpeg", "webp", "gif" or "bmp".
        width: pixels of a stored row.
        height: number of stored rows.
        content: a file of this format with the first frame alone, and without metadata. Only
            this reaches a decoder.
        orientation: EXIF's number of how the stored pixels are turned, 1 to 8.
    """

    format: str
    width: int
    height: int
    content: bytes
    orientation: int = 1

    @property
    def size(self) -> tuple[int, int]:
        """Width and height as seen, that is after turning."""
        is_turned = self.orientation >= 5
        return (self.height, self.width) if is_turned else (self.width, self.height)


def damaged(name: str) -> InvalidRequestError:
    """Return the error for a file that begins as ``name`` does but does not go on like it."""
    return InvalidRequestError(f"The {name} file is truncated or damaged.")


def too_many_parts(name: str) -> InvalidRequestError:
    """Return the error for a file whose structure would keep a decoder busy."""
    return InvalidRequestError(f"The {name} file consists of too many parts.")


def check_frames(num_frames: int, name: str) -> None:
    """Refuse long animations.

    Raises:
        InvalidRequestError: there are more than ``MAX_FRAMES`` frames.
    """
    if num_frames > MAX_FRAMES:
        raise InvalidRequestError(f"The {name} file has more than {MAX_FRAMES} frames.")


def read_fields(layout: str, data: bytes, offset: int, name: str) -> tuple[int, ...]:
    """Return the integers at an offset, see ``struct``.

    Raises:
        InvalidRequestError: the file ends before them.
    """
    try:
        return struct.unpack_from(layout, data, offset)
    except struct.error:
        raise damaged(name) from None


def counted(num_bytes: int, name: str) -> Generator[None]:
    """Yield as often as a file of this size may have chunks, then raise.

    Raises:
        InvalidRequestError: the file has more chunks.
    """
    for _ in range(FREE_CHUNKS + num_bytes // MIN_CHUNK_BYTES):
        yield
    raise too_many_parts(name)
