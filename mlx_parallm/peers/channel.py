"""Python objects between two processes of one server, over a pair of sockets or TCP."""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mlx_parallm.types.errors import ControlError

# Little-endian: the message's number and how many buffers follow its pickle (PEP 574), then the
# sizes of it and of them.
_HEAD = struct.Struct("<QI")
_SIZE = "Q"
# SOCKET_BYTES: size of the kernel's buffer. It holds the events of some steps, so that the engine
# does not wait for the reader, and no more, so that the events that are read are not old.
SOCKET_BYTES = 1 << 17
# SLICE_BYTES: most bytes of one call: Darwin refuses more than 2 GiB.
SLICE_BYTES = 1 << 30
# BUFFER_BYTES: bytes that are read at once, because a reader may wait for the GIL after each call.
BUFFER_BYTES = 1 << 17


class UnreadableError(ControlError):
    """A message has come that cannot be unpickled here; the next one can be received.

    Attributes:
        number: the message's.
    """

    def __init__(self, number: int, cause: Exception) -> None:
        super().__init__(f"A message cannot be read here: {type(cause).__name__}: {cause}")
        self.number = number


@dataclass(frozen=True, slots=True)
class Packed:
    """A message that was pickled once, for several channels.

    Attributes:
        body: the pickle.
        buffers: large arrays of it, which were not copied.
    """

    body: bytes
    buffers: Sequence[memoryview]

    @property
    def nbytes(self) -> int:
        """The size of the message, in bytes."""
        return len(self.body) + sum(buffer.nbytes for buffer in self.buffers)


class Channel:
    """One end of a channel. The other end is trusted: both run the same program.

    Any thread may send; one receives.
    """

    def __init__(self, end: socket.socket, socket_bytes: int | None = SOCKET_BYTES) -> None:
        """Take over a socket.

        Args:
            end: the socket.
            socket_bytes: the size of the kernel's buffer for what is sent; None for its own choice,
                which grows to what a network needs.
        """
        self._socket = end
        self._lock = threading.Lock()
        # Bytes that were read from the socket and belong to no message yet.
        self._unread = memoryview(b"")
        self._buffer = bytearray(BUFFER_BYTES)
        if socket_bytes is not None:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, socket_bytes)

    def send(self, message: Any, number: int = 0) -> None:
        """Send an object and a number; large arrays in it are not copied.

        Raises:
            ControlError: it cannot be pickled; nothing was sent.
            OSError: the other end is gone.
        """
        self.send_packed(pack(message), number)

    def send_packed(self, message: Packed, number: int = 0) -> None:
        """Send a packed message and a number; raise OSError if the other end is gone."""
        body, buffers = message.body, message.buffers
        sizes = struct.pack(f"<{len(buffers) + 1}{_SIZE}", len(body), *(b.nbytes for b in buffers))
        parts = [memoryview(part) for part in (_HEAD.pack(number, len(buffers)) + sizes, body)]
        if len(body) < BUFFER_BYTES:
            # One call and one packet for a small message.
            parts = [memoryview(b"".join(parts))]
        with self._lock:
            for part in (*parts, *buffers):
                for begin in range(0, part.nbytes, SLICE_BYTES):
                    self._socket.sendall(part[begin : begin + SLICE_BYTES])

    def receive(self) -> tuple[Any, int]:
        """Return the next object and its number.

        Raises:
            UnreadableError: it cannot be unpickled.
            EOFError: the other end is gone.
        """
        number, count = _HEAD.unpack(self._read(_HEAD.size))
        form = struct.Struct(f"<{count + 1}{_SIZE}")
        body, *buffers = [self._read(size) for size in form.unpack(self._read(form.size))]
        try:
            return pickle.loads(body, buffers=buffers), number
        except Exception as cause:
            raise UnreadableError(number, cause) from cause

    def hang_up(self) -> None:
        """Close the connection for both ends, and for their threads that wait here."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up and free the descriptor; no thread may use the channel afterwards."""
        self.hang_up()
        self._socket.close()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        left = memoryview(data)
        while left:
            if not self._unread and len(left) < BUFFER_BYTES:
                self._unread = memoryview(self._buffer)[: self._receive_into(self._buffer)]
            count = min(len(left), len(self._unread))
            if count:
                left[:count], self._unread = self._unread[:count], self._unread[count:]
            else:
                count = self._receive_into(left[:SLICE_BYTES])
            left = left[count:]
        return data

    def _receive_into(self, place: bytearray | memoryview) -> int:
        """Read the bytes that have come, at least one; raise EOFError if the other end is gone."""
        try:
            count = self._socket.recv_into(place)
        except OSError:
            count = 0
        if not count:
            raise EOFError("The other process is gone.")
        return count


def pack(message: Any) -> Packed:
    """Return an object as what channels send; raise ControlError if it cannot be pickled."""
    buffers: list[pickle.PickleBuffer] = []
    try:
        body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        return Packed(body, [buffer.raw() for buffer in buffers])
    except Exception as cause:
        # Libraries raise errors of their own.
        raise ControlError(f"It cannot be pickled: {type(cause).__name__}: {cause}") from cause
