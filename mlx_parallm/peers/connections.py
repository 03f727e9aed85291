"""Connections that are handed from process to process, with the bytes that were read of them.

A connection goes by its descriptor (SCM_RIGHTS, unix(7)), which comes with the first byte of a
message: those bytes.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections import deque
from collections.abc import Callable

from mlx_parallm.peers.channel import KEEPS_COPIES, Incoming, SpareDescriptor, pack

logger = logging.getLogger(__name__)

# TAKEN: the message that the other end has taken the oldest descriptor that was sent to it.
TAKEN = None
# READ_BYTES: bytes that are read at once.
READ_BYTES = 1 << 18
# LATER: errors with which a system refuses to send a descriptor now: the user has too many on their
# way, or the socket of a BSD system is full.
LATER = (errno.ETOOMANYREFS, errno.EMSGSIZE, errno.ENOBUFS)
# RETRY_S: seconds until such a descriptor is sent again, or until one is read for which this
# process had no room.
RETRY_S = 0.1

#: Takes over a connection, with the bytes that have been read of it.
Handover = Callable[[socket.socket, bytes], None]


class ConnectionPipe:
    """One end of a pair of Unix sockets that carries connections, on an event loop.

    While this process has no descriptor left, connections wait in the pair, as they do in the queue
    of a socket that listens.
    """

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
            on_dropped: called for each connection that came and was closed by the system, because
                another thread took the last descriptor of this process.
            keeps_copies: a sent descriptor stays open here until the other end acknowledges it, as
                both ends do; see ``KEEPS_COPIES``. Where it is not needed, a copy would delay the
                end that clients see once the other process has closed.
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
        self._spare = SpareDescriptor()
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
        self._spare.close()
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
            if problem.errno in LATER:
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
            while self._may_read():
                self._read_some()
        except BlockingIOError:
            return
        except (EOFError, OSError):
            self._lose()
        if not self._is_closed:
            self._loop.remove_reader(self._end)
            self._loop.call_later(RETRY_S, self._read_again)

    def _read_again(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._end, self._read)

    def _may_read(self) -> bool:
        """True if a connection that comes has room, or what comes first is something else.

        That is the rest of a message, or the acknowledgement of a copy, which frees a descriptor.
        """
        if self._is_closed:
            return False
        return not self._incoming.is_in_head or self._spare.hold() or self._has_no_connection()

    def _has_no_connection(self) -> bool:
        """True if the acknowledgement of a copy comes first, or nothing more."""
        if not self._on_their_way:
            return False
        taken = _frame(TAKEN)
        return self._end.recv(len(taken), socket.MSG_PEEK) in {taken, b""}

    def _read_some(self) -> None:
        """Read the rest of a part of a message."""
        size = min(self._incoming.missing, READ_BYTES)
        data = self._receive_head(size) if self._incoming.is_in_head else self._end.recv(size)
        if not data:
            raise EOFError("The other process is gone.")
        arrived = self._incoming.feed(data)
        if arrived is not None:
            self._take_in(arrived[0])

    def _receive_head(self, size: int) -> bytes:
        """Read up to ``size`` bytes, and the descriptor that comes with the first of a message."""
        data, descriptor = self._spare.receive(self._end, size)
        if descriptor is not None:
            self._arriving = socket.socket(fileno=descriptor)
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
