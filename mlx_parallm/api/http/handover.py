"""Connections that several processes of one server serve in turn.

A process that accepts a connection, or has answered a request on it, may not be the one that serves
its next request. The connection then goes on to another process, by its descriptor (SCM_RIGHTS,
unix(7)), with the bytes of that request that have been read.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from mlx_parallm.api.http.connection import MAX_HEAD_BYTES, BoundedProtocol

logger = logging.getLogger(__name__)

# The number of bytes that come with a descriptor, little-endian, or TAKEN.
_SIZE = struct.Struct("<I")
# TAKEN: the other end has taken the oldest descriptor that was sent to it. No size is as large.
TAKEN = 0xFFFF_FFFF
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

#: Called with a method and a path; True if this process answers such requests.
Serves = Callable[[str, str], bool]
#: Takes over a connection, with the bytes that have been read of it.
Handover = Callable[[socket.socket, bytes], None]


class HandoverProtocol(BoundedProtocol):
    """Serves a connection as long as its requests are for this process.

    Requests that are sent before the one before them has been answered stay here.
    """

    def __init__(
        self,
        *,
        serves: Serves,
        hand_over: Handover,
        head: bytes = b"",
        on_closed: Callable[[], None] = lambda: None,
        **arguments: Any,
    ) -> None:
        """Prepare.

        Args:
            serves: tells requests of this process.
            hand_over: takes over a connection whose next request is for another process.
            head: what another process has read of the connection.
            on_closed: called once the connection is no longer here.
            arguments: of ``BoundedProtocol``.
        """
        super().__init__(**arguments)
        self._serves = serves
        self._hand_over = hand_over
        self._read_before = head
        self._on_closed = on_closed
        # The first bytes of a request whose line is not complete; None while it is served here.
        self._unrouted: bytearray | None = bytearray()
        self._is_in_message = False
        # True once a request has come that must be sent again.
        self._is_refused = False
        # The request to go on with, once the client has read the answer before it.
        self._leaves_with: bytes | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        super().connection_made(transport)
        if self._read_before:
            self.data_received(self._read_before)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        super().connection_lost(exc)
        self._on_closed()

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if self._unrouted is None:
            super().data_received(data)
            return
        self._unrouted += data
        line = request_line(self._unrouted)
        if line is None and len(self._unrouted) <= MAX_HEAD_BYTES:
            return
        head = bytes(self._unrouted)
        if line is not None and not self._serves(*line):
            self._leave(head)
        else:
            self._unrouted = None
            super().data_received(head)

    def on_message_begin(self) -> None:
        """See httptools."""
        self._is_in_message = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Refuse a request for another process that comes before the one before it is answered.

        The connection is closed after that answer, and the client sends the request again
        (RFC 9112, section 9.3.2).
        """
        cycle = cast("RequestResponseCycle | None", self.cycle)
        assert self.parser is not None, "it calls this"
        line = self.parser.get_method().decode(), _path(self.url)
        if cycle is not None and not cycle.response_complete and not self._serves(*line):
            self._is_refused = True
            cycle.keep_alive = False
            self.flow.pause_reading()
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        self._is_in_message = False
        if not self._is_refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Look at the next request before it is read, if none has begun to come."""
        has_more = bool(self.pipeline)
        super().on_response_complete()
        if not has_more and not self._is_in_message and not self.transport.is_closing():
            self._unrouted = bytearray()

    def resume_writing(self) -> None:
        """See asyncio."""
        super().resume_writing()
        if self._leaves_with is not None and not self.transport.is_closing():
            self._give_away(self._leaves_with)

    def _leave(self, head: bytes) -> None:
        """Give the connection away, once the answer before it has been sent."""
        self._unset_keepalive_if_required()
        self.flow.pause_reading()
        if not self.transport.get_write_buffer_size():
            self._give_away(head)
            return
        self._leaves_with = head
        # ``resume_writing`` is called when nothing is left.
        self.transport.set_write_buffer_limits(0)

    def _give_away(self, head: bytes) -> None:
        """Give the connection away: this process closes its own descriptor only."""
        self._leaves_with = None
        try:
            descriptor = os.dup(self.transport.get_extra_info("socket").fileno())
        except OSError as problem:
            logger.warning("a connection is closed: %s", problem.strerror)
            self.transport.abort()
            return
        self.transport.abort()
        self._hand_over(socket.socket(fileno=descriptor), head)


def request_line(head: bytes | bytearray) -> tuple[str, str] | None:
    """Return the method and the path of a request; None if its line is not complete.

    What is no request line gives what no route has; the parser refuses it.
    """
    line, end, _ = bytes(head[:MAX_HEAD_BYTES]).lstrip(b"\r\n").partition(b"\n")
    if not end:
        return None
    method, _, rest = line.partition(b" ")
    return method.decode("latin-1"), _path(rest.partition(b" ")[0])


def _path(target: bytes) -> str:
    """Return the path of a request's target; empty if it is malformed."""
    text = target.decode("latin-1")
    try:
        path = text.partition("?")[0] if text.startswith("/") else urlsplit(text).path
    except ValueError:
        return ""
    return unquote(path)


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
        self._head = b""
        self._arriving: socket.socket | None = None
        self._body = bytearray()
        self._size: int | None = None
        self._is_closed = False
        self._loop.add_reader(end, self._read)

    def send(self, connection: socket.socket, head: bytes) -> None:
        """Give a connection to the other end; it is closed if that is gone."""
        if self._is_closed:
            connection.close()
            return
        self._queue(connection, _SIZE.pack(len(head)) + head)

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
        """Read the rest of a size or of what comes with it; False once the pipe is closed."""
        if self._size is None:
            self._read_head(_SIZE.size - len(self._head))
        elif len(self._body) < self._size:
            self._body += _some(self._end.recv(min(self._size - len(self._body), READ_BYTES)))
        if self._size == len(self._body):
            connection, body = self._arriving, bytes(self._body)
            self._size, self._arriving = None, None
            self._body = bytearray()
            if self._keeps_copies:
                self._queue(None, _SIZE.pack(TAKEN))
            if connection is None:
                logger.warning("a connection is closed: this process has no descriptor left for it")
                self._on_dropped()
            else:
                self._take(connection, body)
        return not self._is_closed

    def _read_head(self, size: int) -> None:
        """Read up to ``size`` bytes of a size, and the descriptor that comes with the first."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._end, size, 1)
        except OSError as problem:
            if problem.errno not in NO_ROOM:
                raise
            data, descriptors = self._end.recv(size), []
        if descriptors:
            self._arriving = socket.socket(fileno=descriptors[0])
        self._head += _some(data)
        if len(self._head) == _SIZE.size:
            size = _SIZE.unpack(self._head)[0]
            self._head = b""
            if size == TAKEN:
                self._on_their_way.popleft().close()
            else:
                self._size = size

    def _lose(self) -> None:
        if not self._is_closed:
            self.close()
            self._on_lost()


def _some(data: bytes) -> bytes:
    if not data:
        raise EOFError("The other process is gone.")
    return data
