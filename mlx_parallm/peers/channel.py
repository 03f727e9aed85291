"""Python objects between two processes of one server, over a pair of sockets or TCP."""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mlx_parallm.types.errors import ControlError

# Little-endian: the message's number and how many buffers follow its pickle (PEP 574), then the
# sizes of it and of them, 8 bytes each.
_HEAD = struct.Struct("<QI")
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

    def parts(self, number: int) -> list[memoryview]:
        """Return what is sent of it, in order; few parts if it is small."""
        sizes = [len(self.body), *(buffer.nbytes for buffer in self.buffers)]
        head = _HEAD.pack(number, len(self.buffers)) + struct.pack(f"<{len(sizes)}Q", *sizes)
        if len(self.body) < BUFFER_BYTES:
            return [memoryview(head + self.body), *self.buffers]
        return [memoryview(head), memoryview(self.body), *self.buffers]


def message_parts() -> Generator[int, bytearray, tuple[Any, int]]:
    """Yield the size of each part of a message, and get it; return the message and its number.

    Raises:
        UnreadableError: it cannot be unpickled; the next message can be read.
    """
    number, count = _HEAD.unpack((yield _HEAD.size))
    sizes = struct.Struct(f"<{count + 1}Q")
    parts: list[bytearray] = []
    for size in sizes.unpack((yield sizes.size)):
        parts.append((yield size))
    try:
        return pickle.loads(parts[0], buffers=parts[1:]), number
    except Exception as cause:
        raise UnreadableError(number, cause) from cause


class Incoming:
    """Puts messages together from the bytes that come, as many at a time as there are.

    Attributes:
        missing: the bytes until the next part of a message is complete.
        is_in_head: True up to the end of the first part of a message.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._parts = message_parts()
        self.missing, self._part, self.is_in_head = next(self._parts), bytearray(), True

    def feed(self, data: bytes | memoryview) -> tuple[Any, int] | None:
        """Take up to ``missing`` bytes; return the message that they complete, and its number.

        Raises:
            UnreadableError: it cannot be unpickled.
        """
        self._part += data
        self.missing -= len(data)
        try:
            while not self.missing:
                part, self._part, self.is_in_head = self._part, bytearray(), False
                self.missing = self._parts.send(part)
        except StopIteration as end:
            self._begin()
            return end.value
        except UnreadableError:
            self._begin()
            raise
        return None


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
        with self._lock:
            for part in message.parts(number):
                for begin in range(0, part.nbytes, SLICE_BYTES):
                    self._socket.sendall(part[begin : begin + SLICE_BYTES])

    def receive(self) -> tuple[Any, int]:
        """Return the next object and its number.

        Raises:
            UnreadableError: it cannot be unpickled.
            EOFError: the other end is gone.
        """
        parts = message_parts()
        size = next(parts)
        while True:
            try:
                size = parts.send(self._read(size))
            except StopIteration as end:
                return end.value

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
