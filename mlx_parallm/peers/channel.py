"""Python objects between two processes of one server, over a pair of sockets or TCP."""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from mlx_parallm.types.errors import ControlError

# Little-endian: the message's number and how many buffers follow its pickle (PEP 574), then the
# sizes of it and of them, 8 bytes each.
_HEAD = struct.Struct("<QI")
# IN_FILE: bit of that count: the buffers are in a file, whose descriptor comes with the first byte.
IN_FILE = 1 << 31
# ALIGNMENT: each buffer in a file begins at a multiple of these bytes.
ALIGNMENT = 64
# SHARED_BYTES: buffers for several processes are in a file if they have as many bytes together.
SHARED_BYTES = 1 << 20
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


class SharedFile:
    """A file of buffers without a name, in memory where the system has such files.

    Attributes:
        descriptor: is closed with this object.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        """Write the buffers; raise OSError if there is no room."""
        with (
            os.fdopen(os.memfd_create("mlx_parallm"), "wb")
            if sys.platform == "linux"
            else tempfile.TemporaryFile()
        ) as file:
            for buffer in buffers:
                file.write(buffer)
                file.write(bytes(-buffer.nbytes % ALIGNMENT))
            file.flush()
            self.descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor)


@dataclass(frozen=True, slots=True)
class Packed:
    """A message that was pickled once, for several channels.

    Attributes:
        body: the pickle.
        buffers: large arrays of it, which were not copied.
        file: has the buffers, for processes that map it; None: they are sent.
    """

    body: bytes
    buffers: Sequence[memoryview]
    file: SharedFile | None = None

    @property
    def nbytes(self) -> int:
        """The size of the message, in bytes."""
        return len(self.body) + sum(buffer.nbytes for buffer in self.buffers)

    def parts(self, number: int) -> list[memoryview]:
        """Return what is sent of it, in order; few parts if it is small."""
        sizes = [len(self.body), *(buffer.nbytes for buffer in self.buffers)]
        count = len(self.buffers) | (0 if self.file is None else IN_FILE)
        head = _HEAD.pack(number, count) + struct.pack(f"<{len(sizes)}Q", *sizes)
        buffers = self.buffers if self.file is None else ()
        if len(self.body) < BUFFER_BYTES:
            return [memoryview(head + self.body), *buffers]
        return [memoryview(head), memoryview(self.body), *buffers]


def _no_descriptor() -> int | None:
    return None


def message_parts(
    descriptor: Callable[[], int | None] = _no_descriptor,
) -> Generator[int, bytearray, tuple[Any, int]]:
    """Yield the size of each part of a message, and get it; return the message and its number.

    ``descriptor`` returns the one that came with the message; None if this process had no room.

    Raises:
        UnreadableError: it cannot be unpickled; the next message can be read.
    """
    number, count = _HEAD.unpack((yield _HEAD.size))
    is_in_file, count = count >= IN_FILE, count % IN_FILE
    form = struct.Struct(f"<{count + 1}Q")
    size, *sizes = form.unpack((yield form.size))
    body = yield size
    buffers: list[bytearray | memoryview] = []
    if not is_in_file:
        for size in sizes:
            buffers.append((yield size))
    try:
        if is_in_file:
            buffers += _mapped(descriptor(), sizes)
        return pickle.loads(body, buffers=buffers), number
    except Exception as cause:
        raise UnreadableError(number, cause) from cause


def _mapped(descriptor: int | None, sizes: Sequence[int]) -> Generator[memoryview]:
    """Yield the buffers of a file; what is written to them is seen by this process only."""
    if descriptor is None:
        raise OSError("no descriptor is left for a file of tensors")
    try:
        memory = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
    finally:
        os.close(descriptor)
    begin = 0
    for size in sizes:
        yield memory[begin : begin + size]
        begin += size + -size % ALIGNMENT


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
        # Those that have come, in the order of their messages; None for one without room here.
        self._descriptors: deque[int | None] = deque()
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
            parts = message.parts(number)
            if message.file is not None:
                socket.send_fds(self._socket, [parts[0][:1]], [message.file.descriptor])
                parts[0] = parts[0][1:]
            for part in parts:
                for begin in range(0, part.nbytes, SLICE_BYTES):
                    self._socket.sendall(part[begin : begin + SLICE_BYTES])

    def receive(self) -> tuple[Any, int]:
        """Return the next object and its number.

        Raises:
            UnreadableError: it cannot be unpickled.
            EOFError: the other end is gone.
        """
        parts = message_parts(self._descriptors.popleft)
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
            count, control, flags, _ = self._socket.recvmsg_into([place], socket.CMSG_SPACE(4))
        except OSError as problem:
            raise EOFError("The other process is gone.") from problem
        if not count:
            raise EOFError("The other process is gone.")
        if control or flags & socket.MSG_CTRUNC:
            data = control[0][2] if control else b""
            self._descriptors.append(struct.unpack("i", data)[0] if len(data) == 4 else None)
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


def pack_shared(message: Any) -> Packed:
    """``pack`` a message for several processes of this machine, which share its large arrays."""
    packed = pack(message)
    if sum(buffer.nbytes for buffer in packed.buffers) < SHARED_BYTES:
        return packed
    try:
        return replace(packed, file=SharedFile(packed.buffers))
    except OSError:
        # There is no room for a file: they are sent.
        return packed
