"""A change on the wire: its length, JSON, and the bytes of a safetensors file."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

from mlx_parallm.replicas.entries import Entry
from mlx_parallm.replicas.host import Content
from mlx_parallm.types.errors import InvalidRequestError

LENGTH_BYTES = 4
# MAX_HEAD_BYTES: of the JSON, which names each module of an adapter.
MAX_HEAD_BYTES = 16 * 2**20
PIECE_BYTES = 2**20


def pack_head(entry: Entry) -> bytes:
    """Return what comes before the tensors of a change."""
    head = json.dumps(entry.to_json()).encode()
    return len(head).to_bytes(LENGTH_BYTES, "little") + head


async def pieces(head: bytes, content: Content | None) -> AsyncGenerator[bytes]:
    """Yield the body with a change in pieces."""
    if head:
        yield head
    view = memoryview(content or b"")
    for start in range(0, len(view), PIECE_BYTES):
        yield bytes(view[start : start + PIECE_BYTES])


class FrameReader:
    """Takes a body with a change as it comes; its tensors are not copied once more."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._content = bytearray()

    def feed(self, piece: bytes) -> None:
        """Take the next piece; raise InvalidRequestError if the change is too long."""
        missing = self._missing(piece)
        self._head += piece[:missing]
        self._content += piece[missing:]

    def _missing(self, piece: bytes) -> int:
        """Return how many bytes of a piece belong to the head."""
        begin = (self._head + piece[:LENGTH_BYTES])[:LENGTH_BYTES]
        if len(begin) < LENGTH_BYTES:
            return len(piece)
        length = int.from_bytes(begin, "little")
        if length > MAX_HEAD_BYTES:
            raise InvalidRequestError("This is no change of a fleet.", param="entry")
        return max(0, LENGTH_BYTES + length - len(self._head))

    def finish(self) -> tuple[Entry, Content | None]:
        """Return the change and its tensors; raise InvalidRequestError if it is none."""
        length = int.from_bytes(self._head[:LENGTH_BYTES], "little")
        if len(self._head) != LENGTH_BYTES + length:
            raise InvalidRequestError("This is no change of a fleet: it is cut off.", param="entry")
        try:
            head = json.loads(self._head[LENGTH_BYTES:])
        except (ValueError, RecursionError):
            raise InvalidRequestError("This is no change of a fleet.", param="entry") from None
        entry = Entry.from_json(head)
        return entry, None if entry.content is None else self._content
