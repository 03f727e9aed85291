"""Python objects between the event loops of two processes of one server."""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import struct
from collections.abc import Callable
from typing import Any, cast

logger = logging.getLogger(__name__)

# Little-endian: the message's number, and the size of its pickle.
_HEAD = struct.Struct("<QQ")


class Wire(asyncio.Protocol):
    """One end of a connection. The other end is trusted: both run the same program.

    Its methods are called on one event loop. What is sent is kept in memory until it is read.
    """

    def __init__(self, take: Callable[[Any, int], None], on_lost: Callable[[], None]) -> None:
        """Prepare; see ``connect``.

        Args:
            take: called with each message and its number.
            on_lost: called once the other end is gone, or this end was closed.
        """
        self._take = take
        self._on_lost = on_lost
        self._transport: asyncio.WriteTransport | None = None
        self._unread = bytearray()

    async def connect(self, end: socket.socket) -> None:
        """Begin to read from a connected socket."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def send(self, message: Any, number: int = 0) -> None:
        """Send an object and a number; nothing happens if the other end is gone.

        Raises:
            Exception: it cannot be pickled.
        """
        body = pickle.dumps(message, protocol=5)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_HEAD.pack(number, len(body)) + body)

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast("asyncio.WriteTransport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._transport = None
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._unread += data
        begin = 0
        while len(self._unread) - begin >= _HEAD.size:
            number, size = _HEAD.unpack_from(self._unread, begin)
            end = begin + _HEAD.size + size
            if len(self._unread) < end:
                break
            body = bytes(memoryview(self._unread)[begin + _HEAD.size : end])
            begin = end
            self._take(pickle.loads(body), number)
        del self._unread[:begin]
