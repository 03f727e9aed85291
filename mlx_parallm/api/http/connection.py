"""Bounds for connections: slow request heads, answers that are not read, late bodies."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

# MAX_HEAD_BYTES: size of a request's line and headers together; nginx allows 32 KiB.
MAX_HEAD_BYTES = 64 * 1024
# MAX_FRAMING_BYTES: bytes between two parts of a body, and after the last: sizes of chunks, their
# extensions, and trailers. The parser keeps a trailer until it is complete, so an endless one would
# fill the memory.
MAX_FRAMING_BYTES = 512 * 1024
# MAX_LATE_BYTES, MAX_LATE_S: bounds on the rest of a body whose request has been answered, such as
# a request that was refused by its head. Many clients send the whole body before they read the
# answer, and closing a connection with unread data can lose the answer.
MAX_LATE_BYTES = 1024 * 1024
MAX_LATE_S = 5.0
# CYCLE: the key in a scope of HTTP/1.0 under which is what writes its answer.
CYCLE = "mlx_parallm.cycle"


# CONNECTION: the headers in which the parser looks for UPGRADE, the wish for another protocol.
CONNECTION = (b"connection", b"proxy-connection")
UPGRADE = re.compile(rb"upgrade", re.IGNORECASE)
# WEBSOCKET: the protocol that a request may offer to go on with.
WEBSOCKET = "websocket"
# SWITCH: the key in a scope under which is ``BoundedProtocol.switch``; only requests that offer a
# WebSocket have it.
SWITCH = "mlx_parallm.switch"


class Successor(Protocol):
    """Goes on with a connection in place of HTTP; see asyncio, whose protocols it is like."""

    def start(self, wire: BoundedProtocol) -> None:
        """Begin; the last answer of HTTP is written."""
        ...

    def data_received(self, data: bytes) -> None:
        """Take in what the client has sent."""
        ...

    def pause_writing(self) -> None:
        """Note that the client does not read."""
        ...

    def resume_writing(self) -> None:
        """Note that the client reads again."""
        ...

    def connection_lost(self) -> None:
        """Note that the client is gone."""
        ...

    def shutdown(self) -> None:
        """End the connection once nothing is worked on."""
        ...


class UnchunkedAnswers:
    """Ends answers of unknown length to HTTP/1.0 by closing the connection.

    uvicorn would write them in chunks, which HTTP/1.0 does not know (RFC 9112, section 7).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """See ASGI."""
        cycle: RequestResponseCycle | None = scope.get(CYCLE)
        if cycle is None:
            return self._app(scope, receive, send)

        def send_unchunked(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                if b"content-length" not in names:
                    cycle.chunked_encoding = cycle.keep_alive = False
            elif cycle.expected_content_length == 0:
                cycle.expected_content_length = len(message.get("body", b""))
            return send(message)

        return self._app(scope, receive, send_unchunked)


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which ends connections that make no progress.

    A client must send the head of a request within the timeout, and read some of a written answer
    within it: uvicorn itself waits forever in both cases. The rest of a body whose request has been
    answered is read and dropped within bounds; uvicorn has none.

    A request that offers another protocol is answered as any other. If that was a WebSocket, the
    answer may accept it: see ``switch``.
    """

    def __init__(self, *, timeout_s: float, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self.app = UnchunkedAnswers(self.app)
        self._timeout_s = timeout_s
        self._head: asyncio.TimerHandle | None = None
        self._write: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        # True while a body is to come, and the bytes since its latest part: framing and trailers.
        self._awaits_body = False
        self._framing_bytes = 0
        self._late: asyncio.TimerHandle | None = None
        self._late_bytes = 0
        # The data at hand; the head of a request that offers another protocol, without the offer;
        # and the data that is to be read again.
        self._data = b""
        self._offer: bytes | None = None
        self._again: bytes | None = None
        self._is_read_again = False
        # What goes on with the connection in place of HTTP, and what will once the current request
        # is answered.
        self.successor: Successor | None = None
        self._next_successor: Successor | None = None

    @property
    def is_busy(self) -> bool:
        """True if a request is being answered."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is not None and not cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        for timer in (self._head, self._write, self._late):
            _cancelled(timer)
        self._head = self._write = self._late = None
        if self.successor is not None:
            self.successor.connection_lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if self.successor is not None:
            self.successor.data_received(data)
            return
        self._head_bytes += len(data)
        self._framing_bytes += len(data)
        self._read(data)
        if self._head is not None and self._head_bytes > MAX_HEAD_BYTES:
            self.transport.abort()
        if self._awaits_body and self._framing_bytes > MAX_FRAMING_BYTES:
            self.transport.abort()
        if self._late is not None:
            self._late_bytes += len(data)
            if self._late_bytes > MAX_LATE_BYTES:
                # The timer continues, because the client may not read the answer either.
                self.transport.close()

    def on_message_begin(self) -> None:
        """Start the timeout of a request's head at its first byte."""
        super().on_message_begin()
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; drop a trailer, which comes after a body.

        Trailers must not change what the head decided, such as the client.
        """
        if not self._awaits_body:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Reset the count of framing bytes at a part of a body."""
        self._framing_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """End the timeout of a request's head; put off one that offers another protocol."""
        # CONNECT asks for a tunnel, not for another protocol.
        makes_offer = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if makes_offer and not self._is_read_again:
            self._offer = self._plain_head()
            return
        is_offer = self._is_read_again and self.parser.get_method() == b"GET"
        self._is_read_again = False
        self._awaits_body = True
        self._framing_bytes = 0
        self._head = _cancelled(self._head)
        self._take_host_of_target()
        super().on_headers_complete()
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is not None and cycle.scope["http_version"] == "1.0":
            cycle.scope[CYCLE] = cycle  # type: ignore[typeddict-unknown-key]
        elif cycle is not None and is_offer and self._offers_socket():
            cycle.scope[SWITCH] = self.switch  # type: ignore[typeddict-unknown-key]

    def on_message_complete(self) -> None:
        """Note the end of a request's body."""
        if self._offer is not None:
            return
        self._awaits_body = False
        super().on_message_complete()
        if self._late is not None:
            self._late = _cancelled(self._late)
            self._await_head()

    def switch(self, successor: Successor) -> None:
        """Let a WebSocket go on with the connection once the current request is answered.

        The answer has the status 101, and no body.
        """
        self._next_successor = successor
        # Neither is a header of such an answer.
        self.cycle.chunked_encoding = False
        self.cycle.keep_alive = True

    def shutdown(self) -> None:
        """End the connection once the request or message is answered that is worked on."""
        if self.successor is not None:
            self.successor.shutdown()
        else:
            super().shutdown()

    def on_response_complete(self) -> None:
        """Bound the rest of a body whose request has been answered, or switch to a WebSocket."""
        if self._next_successor is not None:
            self.successor = self._next_successor
            self.successor.start(self)
            return
        super().on_response_complete()
        # This is the connection's last request; earlier ones have arrived as a whole.
        if self.cycle.response_complete and self.cycle.more_body:
            self._late_bytes = 0
            seconds = min(MAX_LATE_S, self._timeout_s or MAX_LATE_S)
            self._late = self.loop.call_later(seconds, self.transport.abort)

    def pause_writing(self) -> None:
        """Watch the write buffer, which the client does not read fast enough."""
        super().pause_writing()
        if self.successor is not None:
            self.successor.pause_writing()
        self._watch_write(None)

    def resume_writing(self) -> None:
        """Stop watching the write buffer, most of which the client has read."""
        self._write = _cancelled(self._write)
        super().resume_writing()
        if self.successor is not None:
            self.successor.resume_writing()

    def _watch_write(self, unsent_before: int | None) -> None:
        """Check again after the timeout; abort if the client read nothing meanwhile."""
        unsent = self.transport.get_write_buffer_size()
        if unsent_before is not None and unsent >= unsent_before:
            self.transport.abort()
        elif self._timeout_s:
            _cancelled(self._write)
            self._write = self.loop.call_later(self._timeout_s, self._watch_write, unsent)

    def _unsupported_upgrade_warning(self) -> None:
        """Read a request that offers another protocol as one of HTTP/1 (RFC 9110, section 7.8).

        uvicorn would drop its body: Java's client offers HTTP/2 with every request. Called while
        the parser's exception, which has the place where it stopped, is handled.
        """
        stop = sys.exception()
        if self._offer is None or not isinstance(stop, httptools.HttpParserUpgrade):
            return
        self._again = self._offer + self._data[stop.args[0] :]
        self._offer = None
        self.parser = httptools.HttpRequestParser(self)
        # As uvicorn's own: bytes may follow the last request of a connection.
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _read(self, data: bytes) -> None:
        self._data = data
        super().data_received(data)
        while self._again is not None:
            self._data, self._again, self._is_read_again = self._again, None, True
            super().data_received(self._data)

    def _plain_head(self) -> bytes:
        """Return the head that was read, without the wish to use another protocol."""
        assert self.parser is not None, "it calls this"
        line = b"%s %s HTTP/%s" % (
            self.parser.get_method(),
            self.url,
            self.parser.get_http_version().encode(),
        )
        lines = [line]
        for name, value in self.headers:
            if name in CONNECTION:
                value = UPGRADE.sub(b"", value)
            lines.append(b"%s: %s" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def _offers_socket(self) -> bool:
        offers = [value for name, value in self.headers if name == b"upgrade"]
        return len(offers) == 1 and offers[0].lower() == WEBSOCKET.encode()

    def _take_host_of_target(self) -> None:
        """Let an absolute request target replace the Host header (RFC 9112, section 3.2.2)."""
        if self.url.startswith(b"/"):
            return
        authority = urlsplit(self.url).netloc
        if authority:
            self.headers[:] = [header for header in self.headers if header[0] != b"host"]
            self.headers.append((b"host", authority))

    def _await_head(self) -> None:
        self._head_bytes = 0
        _cancelled(self._head)
        self._head = None
        if self._timeout_s:
            self._head = self.loop.call_later(self._timeout_s, self.transport.abort)


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
