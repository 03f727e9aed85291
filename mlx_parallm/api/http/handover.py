"""Connections that several processes of one server serve in turn.

A process that accepts a connection, or has answered a request on it, may not be the one that serves
its next request. The connection then goes on to another process, by its descriptor (SCM_RIGHTS,
unix(7)), with the bytes of that request that have been read.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from mlx_parallm.api.http.connection import MAX_HEAD_BYTES, BoundedProtocol
from mlx_parallm.peers.connections import Handover

logger = logging.getLogger(__name__)

#: Called with a method and a path; True if this process answers such requests.
Serves = Callable[[str, str], bool]


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
            serves: True for the requests of this process.
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
        goes_on = not self.transport.is_closing() and self.successor is None
        if goes_on and not has_more and not self._is_in_message:
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
