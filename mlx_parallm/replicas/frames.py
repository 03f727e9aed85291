"""A change on the wire: its length, JSON, and the bytes of a safetensors file."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

from mlx_parallm.replicas.entries import Entry
from mlx_parallm.types.errors import InvalidRequestError

LENGTH_BYTES = 4
# MAX_HEAD_BYTES: of the JSON, which names each module of an adapter.
MAX_HEAD_BYTES = 16 * 2**20
PIECE_BYTES = 2**20


def pack_head(entry: Entry) -> bytes:
    """Return what comes before the tensors of a change."""
    head = json.dumps(entry.to_json()).encode()
    return len(head).to_bytes(LENGTH_BYTES, "little") + head


async def pieces(head: bytes, content: bytes | None) -> AsyncGenerator[bytes]:
    """Yield the body with a change in pieces."""
    yield head
    view = memoryview(content or b"")
    for start in range(0, len(view), PIECE_BYTES):
        yield bytes(view[start : start + PIECE_BYTES])


def unpack(body: bytes | bytearray) -> tuple[Entry, bytes | None]:
    """Return the change of a body, and its tensors; raise InvalidRequestError if it is none."""
    length = int.from_bytes(body[:LENGTH_BYTES], "little")
    end = LENGTH_BYTES + length
    if len(body) < LENGTH_BYTES or length > MAX_HEAD_BYTES or len(body) < end:
        raise InvalidRequestError("This is no change of a fleet: it is cut off.", param="entry")
    try:
        head = json.loads(body[LENGTH_BYTES:end])
    except (ValueError, RecursionError):
        raise InvalidRequestError("This is no change of a fleet.", param="entry") from None
    entry = Entry.from_json(head)
    return entry, None if entry.content is None else bytes(memoryview(body)[end:])
