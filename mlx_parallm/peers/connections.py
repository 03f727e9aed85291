"""Connections that are handed from process to process, with the bytes that were read of them.

A connection goes by its descriptor (SCM_RIGHTS, unix(7)), which comes with the first byte of a
message: those bytes.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import sys
from collections import deque
from collections.abc import Callable

from mlx_parallm.peers.channel import Incoming, pack

logger = logging.getLogger(__name__)

# TAKEN: the message that the other end has taken the oldest descriptor that was sent to it.
TAKEN = None
# KEEPS_COPIES: macOS may collect a descriptor that is only on its way and in no process. Other
# systems need no copy, which delays the end that clients see once the other process has closed.
KEEPS_COPIES = sys.platform == "darwin"
# READ_BYTES: bytes that are read at once.
READ_BYTES = 1 << 18
# NO_ROOM: a descriptor that came has no room in this process. Linux reports no error and drops the
# descriptor; BSD systems refuse the first read after it.
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.EMSGSIZE)
# RETRY_S: seconds until descriptors are sent again, of which the user has too many on their way.
RETRY_S = 0.1

#: Takes over a connection, with the bytes that have been read of it.
Handover = Callable[[socket.socket, bytes], None]


class ConnectionPipe:
    """One end of a pair of Unix sockets that carries connections, on an event loop."""

    def __init__(
        self,
        end: socket.socket,
        take: Handover,
        on_lost: Callable[[], None],
        on_dropped: Callable[[], None] = lambda: None,
        *,
        keeps_copies: bool = KEEPS_COPIES,
    ) -> None:
        """Begin to read.

        Args:
            end: a stream socket; it belongs to the pipe from now on.
            take: called with each connection that comes.
            on_lost: called once the other end is gone.
            on_dropped: called for each connection that came and for which this process has no
                descriptor left. The system has closed it.
            keeps_copies: a sent descriptor stays open here until the other end acknowledges it, as
                both ends do; see ``KEEPS_COPIES``.
        """
        end.setblocking(False)
        self._end = end
        self._take = take
        self._on_lost = on_lost
        self._on_dropped = on_dropped
        self._keeps_copies = keeps_copies
        self._loop = asyncio.get_running_loop()
        # What is still to be sent: the descriptor goes with the first byte.
        self._unsent: deque[tuple[socket.socket | None, memoryview]] = deque()
        # The copies of what was sent and is not acknowledged, in the order of sending.
        self._on_their_way: deque[socket.socket] = deque()
        self._incoming = Incoming()
        self._arriving: socket.socket | None = None
        self._is_closed = False
        self._loop.add_reader(end, self._read)

    def send(self, connection: socket.socket, head: bytes) -> None:
        """Give a connection to the other end; it is closed if that is gone."""
        if self._is_closed:
            connection.close()
            return
        self._queue(connection, _frame(head))

    def close(self) -> None:
        """Close the pair, and the connections that have not been sent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._end)
        self._loop.remove_writer(self._end)
        self._end.close()
        for connection, _ in self._unsent:
            if connection is not None:
                connection.close()
        self._unsent.clear()
        for connection in self._on_their_way:
            connection.close()
        self._on_their_way.clear()
        if self._arriving is not None:
            self._arriving.close()

    def _queue(self, connection: socket.socket | None, data: bytes) -> None:
        self._unsent.append((connection, memoryview(data)))
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        if self._is_closed:
            return
        try:
            while self._unsent:
                connection, data = self._unsent[0]
                if connection is None:
                    sent = self._end.send(data)
                else:
                    sent = socket.send_fds(self._end, [data], [connection.fileno()])
                    self._let_go(connection)
                if sent < len(data):
                    self._unsent[0] = None, data[sent:]
                else:
                    self._unsent.popleft()
        except BlockingIOError:
            self._loop.add_writer(self._end, self._flush)
            return
        except OSError as problem:
            if problem.errno == errno.ETOOMANYREFS:
                self._loop.remove_writer(self._end)
                self._loop.call_later(RETRY_S, self._flush)
            else:
                self._lose()
            return
        self._loop.remove_writer(self._end)

    def _let_go(self, connection: socket.socket) -> None:
        if self._keeps_copies:
            self._on_their_way.append(connection)
        else:
            connection.close()

    def _read(self) -> None:
        try:
            while self._read_some():
                pass
        except BlockingIOError:
            pass
        except (EOFError, OSError):
            self._lose()

    def _read_some(self) -> bool:
        """Read the rest of a part of a message; False once the pipe is closed."""
        size = min(self._incoming.missing, READ_BYTES)
        data = self._receive_head(size) if self._incoming.is_in_head else self._end.recv(size)
        if not data:
            raise EOFError("The other process is gone.")
        arrived = self._incoming.feed(data)
        if arrived is not None:
            self._take_in(arrived[0])
        return not self._is_closed

    def _receive_head(self, size: int) -> bytes:
        """Read up to ``size`` bytes, and the descriptor that comes with the first of a message."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._end, size, 1)
        except OSError as problem:
            if problem.errno not in NO_ROOM:
                raise
            data, descriptors = self._end.recv(size), []
        if descriptors:
            self._arriving = socket.socket(fileno=descriptors[0])
        return data

    def _take_in(self, head: bytes | None) -> None:
        if head is None:  # TAKEN
            self._on_their_way.popleft().close()
            return
        connection, self._arriving = self._arriving, None
        if self._keeps_copies:
            self._queue(None, _frame(TAKEN))
        if connection is None:
            logger.warning("a connection is closed: this process has no descriptor left for it")
            self._on_dropped()
        else:
            self._take(connection, head)

    def _lose(self) -> None:
        if not self._is_closed:
            self.close()
            self._on_lost()


def _frame(head: bytes | None) -> bytes:
    return b"".join(pack(head).parts(0))
