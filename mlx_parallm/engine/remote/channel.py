"""Python objects between two processes of one server, over a pair of sockets."""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from typing import Any

# Little-endian: how many buffers follow the pickle (PEP 574), then the sizes of it and of them.
_COUNT = struct.Struct("<I")
_SIZE = "Q"
# Of the kernel: the events of some steps, so that the engine need not wait for the reader, and no
# more, so that what is read is not old.
SOCKET_BYTES = 1 << 17
PICKLE_ERRORS = (pickle.PicklingError, TypeError, AttributeError)


class Channel:
    """One end. Whoever is at the other end is trusted: both run the same program.

    Any thread may send; one receives.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lock = threading.Lock()
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)

    def send(self, message: Any) -> None:
        """Send an object; large arrays in it are not copied.

        Raises:
            PicklingError, TypeError, AttributeError: it cannot be pickled; nothing was sent.
            OSError: the other end is gone.
        """
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        parts = [memoryview(body), *(one.raw() for one in buffers)]
        sizes = struct.pack(f"<{len(parts)}{_SIZE}", *(one.nbytes for one in parts))
        with self._lock:
            self._socket.sendall(_COUNT.pack(len(buffers)) + sizes + body)
            for part in parts[1:]:
                self._socket.sendall(part)

    def receive(self) -> Any:
        """The next object.

        Raises:
            EOFError: the other end is gone.
        """
        (count,) = _COUNT.unpack(self._read(_COUNT.size))
        form = struct.Struct(f"<{count + 1}{_SIZE}")
        body, *buffers = [self._read(size) for size in form.unpack(self._read(form.size))]
        return pickle.loads(body, buffers=buffers)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        left = memoryview(data)
        while left:
            try:
                count = self._socket.recv_into(left)
            except ConnectionError:
                count = 0
            if not count:
                raise EOFError("The other process is gone.")
            left = left[count:]
        return data
