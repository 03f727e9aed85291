"""Python objects between the event loops of two processes of one server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

from mlx_parallm.peers.channel import Incoming, Packed, UnreadableError, pack


class Wire(asyncio.Protocol):
    """One end of a connection. The other end is trusted: both run the same program.

    Its methods are called on one event loop. What is sent is kept in memory until it is read.
    """

    def __init__(self, take: Callable[[Any, int], None], on_lost: Callable[[], None]) -> None:
        """Prepare; see ``connect``.

        Args:
            take: called with each message and its number; with an UnreadableError in place of a
                question or reply that cannot be unpickled here.
            on_lost: called once the other end is gone, or this end was closed.
        """
        self._take = take
        self._on_lost = on_lost
        self._transport: asyncio.WriteTransport | None = None
        self._incoming = Incoming()

    async def connect(self, end: socket.socket) -> None:
        """Begin to read from a connected socket."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def send(self, message: Any, number: int = 0) -> None:
        """Send an object and a number; nothing happens if the other end is gone.

        Raises:
            ControlError: it cannot be pickled.
        """
        self.send_packed(pack(message), number)

    def send_packed(self, message: Packed, number: int = 0) -> None:
        """Send a message that was packed for several wires; see ``send``."""
        if self._transport is not None and not self._transport.is_closing():
            for part in message.parts(number):
                self._transport.write(part)

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
        left = memoryview(data)
        while left:
            size = self._incoming.missing
            piece, left = left[:size], left[size:]
            try:
                taken = self._incoming.feed(piece)
            except UnreadableError as problem:
                if not problem.number:
                    # No caller waits for it, and both ends would differ from now on.
                    raise
                taken = problem, problem.number
            if taken is not None:
                self._take(*taken)
