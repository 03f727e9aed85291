"""Python objects between two processes of one server, over a pair of sockets or TCP."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import pickle
import socket
import struct
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from mlx_parallm.types.errors import ControlError

logger = logging.getLogger(__name__)

# Little-endian: the message's number and how many buffers follow its pickle (PEP 574), then the
# sizes of it and of them, 8 bytes each.
_HEAD = struct.Struct("<QI")
# IN_FILE: bit of that count: the buffers are in a file, whose descriptor was sent before.
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
# NO_ROOM: a descriptor that came has no room in this process. Linux reports no error and drops the
# descriptor; BSD systems refuse the first read after it.
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.EMSGSIZE)
#: ``KEEPS_COPIES``: macOS may collect a descriptor that is only on its way and in no process, so
#: the sender keeps it open until the receiver has it. Other systems need no copy.
KEEPS_COPIES = sys.platform == "darwin"


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


class SpareDescriptor:
    """A descriptor in reserve: closed for one that comes when this process has no room left."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self.hold()

    def hold(self) -> bool:
        """Open it if it is closed; False if there is no room."""
        if self._descriptor is None:
            with suppress(OSError):
                self._descriptor = os.open(os.devnull, os.O_RDONLY)
        return self._descriptor is not None

    def close(self) -> None:
        """Leave its room to another descriptor."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def receive(self, end: socket.socket, size: int) -> tuple[bytes, int | None]:
        """Read up to ``size`` bytes, and the descriptor that comes with the first of them.

        It takes the spare one's place, which is opened again if there is room. None is returned if
        no descriptor came, or if another thread took its place.

        Raises:
            OSError: the socket cannot be read.
        """
        self.close()
        try:
            data, descriptors, _, _ = socket.recv_fds(end, size, 1)
        except OSError as problem:
            if problem.errno not in NO_ROOM:
                raise
            return end.recv(size), None
        finally:
            self.hold()
        return data, descriptors[0] if descriptors else None


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


def _no_file() -> memoryview:
    raise OSError("no files come here")


def message_parts(
    contents: Callable[[], memoryview] = _no_file,
) -> Generator[int, bytearray, tuple[Any, int]]:
    """Yield the size of each part of a message, and get it; return the message and its number.

    ``contents`` returns those of the file that came with the message.

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
            buffers += _cut(contents(), sizes)
        return pickle.loads(body, buffers=buffers), number
    except Exception as cause:
        raise UnreadableError(number, cause) from cause


def _cut(contents: memoryview, sizes: Sequence[int]) -> Generator[memoryview]:
    """Yield the buffers of a file."""
    begin = 0
    for size in sizes:
        yield contents[begin : begin + size]
        begin += size + -size % ALIGNMENT


class FileSocket:
    """One end of a pair of sockets that carries the descriptors of files.

    A channel needs it beside its own socket to know when a descriptor comes: the descriptor is sent
    before the message.
    """

    def __init__(self, end: socket.socket) -> None:
        """Take over the socket."""
        end.setblocking(False)
        self._end = end
        self._spare = SpareDescriptor()

    def send(self, file: SharedFile) -> bool:
        """Send the descriptor of a file; False if the file's buffers are to be sent instead."""
        try:
            socket.send_fds(self._end, [b"\0"], [file.descriptor])
        except OSError as problem:
            # Too many are on their way (ETOOMANYREFS), or the socket is full. Where the other end
            # is gone, the message cannot be sent either.
            logger.debug("a file is sent as a copy: %s", problem)
            return False
        return True

    def receive(self) -> memoryview:
        """Return the contents of the next file; only this process sees what is written to them.

        Raises:
            OSError: another thread took the last descriptor of this process.
        """
        _, descriptor = self._spare.receive(self._end, 1)
        if descriptor is None:
            raise OSError("no descriptor is left for a file of tensors")
        try:
            return _contents(descriptor)
        finally:
            os.close(descriptor)
            self._spare.hold()

    def close(self) -> None:
        """Free the descriptors."""
        self._end.close()
        self._spare.close()


def _contents(descriptor: int) -> memoryview:
    """Return the bytes of a file: mapped, or copied if no descriptor is left for the map's own."""
    try:
        return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
    except OSError as problem:
        if problem.errno not in NO_ROOM:
            raise
    copy = memoryview(bytearray(os.fstat(descriptor).st_size))
    begin = 0
    while begin < len(copy):
        # Other processes read the same open file, whose position they share.
        data = os.pread(descriptor, SLICE_BYTES, begin)
        copy[begin : begin + len(data)] = data
        begin += len(data)
    return copy


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

    def __init__(
        self,
        end: socket.socket,
        files: socket.socket | None = None,
        *,
        socket_bytes: int | None = SOCKET_BYTES,
    ) -> None:
        """Take over the sockets.

        Args:
            end: the socket.
            files: the socket of a ``FileSocket``; None if all buffers are sent.
            socket_bytes: the size of the kernel's buffer for what is sent; None for its own choice,
                which grows to what a network needs.
        """
        self._socket = end
        self._lock = threading.Lock()
        # Bytes that were read from the socket and belong to no message yet.
        self._unread = memoryview(b"")
        self._buffer = bytearray(BUFFER_BYTES)
        self._files = None if files is None else FileSocket(files)
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
            if message.file is not None and not (self._files and self._files.send(message.file)):
                message = replace(message, file=None)
            for part in message.parts(number):
                for begin in range(0, part.nbytes, SLICE_BYTES):
                    self._socket.sendall(part[begin : begin + SLICE_BYTES])

    def receive(self) -> tuple[Any, int]:
        """Return the next object and its number.

        Raises:
            UnreadableError: it cannot be unpickled.
            EOFError: the other end is gone.
        """
        parts = message_parts(self._files.receive if self._files is not None else _no_file)
        size = next(parts)
        while True:
            try:
                size = parts.send(self._read(size))
            except StopIteration as end:
                return end.value

    def limit_silence(self, timeout_s: float) -> None:
        """Take the other end for gone if not one byte comes for this long; see ``receive``.

        The kernel waits, so this process may be stopped for longer: what came meanwhile counts.
        """
        seconds, rest = divmod(timeout_s, 1)
        limit = struct.pack("@ll", int(seconds), int(rest * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def hang_up(self) -> None:
        """Close the connection for both ends, and for their threads that wait here."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up and free the descriptors; no thread may use the channel afterwards."""
        self.hang_up()
        with self._lock:
            self._socket.close()
        if self._files is not None:
            self._files.close()

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
        except OSError as problem:
            raise EOFError("The other process is gone.") from problem
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
