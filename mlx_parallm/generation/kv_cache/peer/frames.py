"""The bytes in which a server answers with blocks.

A magic, a header, then a frame for each block: its length, a digest of content and bytes, and the
bytes. Numbers are little-endian. An answer may end after any frame: what follows is not there.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import Final

from mlx_parallm.types.content import Buffer
from mlx_parallm.types.errors import ParallmError

MAGIC: Final = b"mlxpkvp\x01"
DIGEST_BYTES: Final = 16
# _HEAD: magic, digest of the owner. _FRAME: bytes of the block, digest of content and bytes.
_HEAD = struct.Struct(f"<8s{DIGEST_BYTES}s")
_FRAME = struct.Struct(f"<I{DIGEST_BYTES}s")
HEAD_BYTES: Final = _HEAD.size
FRAME_BYTES: Final = _FRAME.size


class BadFramesError(ParallmError):
    """An answer is not what a server of equal identity sends."""


def pack_head(owner: str) -> bytes:
    """Return how an answer begins; ``owner`` is the digest of an ``Identity``."""
    return _HEAD.pack(MAGIC, _digest(owner.encode()))


def pack_frame(content: bytes, data: Buffer) -> bytes:
    """Return the frame of a block, without its bytes, which follow."""
    return _FRAME.pack(len(data), _digest(content, data))


def unpack_frames(
    answer: bytes, owner: str, contents: Sequence[bytes], num_bytes: int
) -> Iterator[bytes]:
    """Yield the blocks of an answer, verified, in order; they are the leading ones of ``contents``.

    Args:
        answer: its bytes.
        owner: the digest of the ``Identity`` that it must be of.
        contents: what was asked for.
        num_bytes: the size of each block.

    Raises:
        BadFramesError: it is of another identity, or a block is not what was sent.
    """
    if answer[:HEAD_BYTES] != pack_head(owner):
        raise BadFramesError("it answers with something else than blocks of this model")
    start, wanted = HEAD_BYTES, iter(contents)
    while start < len(answer):
        if len(answer) - start < FRAME_BYTES:
            raise BadFramesError("its answer ends within a block")
        length, digest = _FRAME.unpack_from(answer, start)
        start += FRAME_BYTES
        if length != num_bytes:
            raise BadFramesError(f"its block has {length} bytes, not {num_bytes}")
        data, content = answer[start : start + length], next(wanted, None)
        if content is None:
            raise BadFramesError("more blocks came than were asked for")
        if digest != _digest(content, data):
            raise BadFramesError("its block is damaged")
        yield data
        start += length


def _digest(*parts: Buffer) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()[:DIGEST_BYTES]
