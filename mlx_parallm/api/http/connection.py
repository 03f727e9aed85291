"""Bounds what a connection may cost: slow request heads, answers that are not read, late bodies."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Of a request's line and headers together; nginx takes 32 KiB.
MAX_HEAD_BYTES = 64 * 1024
# Between two parts of a body, and after the last: sizes of chunks, their extensions, and trailers.
# The parser keeps a trailer until it is whole, so an endless one would fill the memory.
MAX_FRAMING_BYTES = 512 * 1024
# A request that was answered before its body had come, as those refused by their head are, is read
# on within these bounds. Many clients send all of a body before they read the answer, and to close
# a connection with data unread can take the answer from them.
MAX_LATE_BYTES = 1024 * 1024
MAX_LATE_S = 5.0


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which ends connections that make no progress.

    A connection must bring the head of a request within the timeout, and take some of an answer
    that is written within it: uvicorn itself waits for ever in both cases. The rest of a body whose
    request has been answered is read and dropped within bounds, and without any by uvicorn.
    """

    def __init__(self, *, timeout_s: float, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._timeout_s = timeout_s
        self._head: asyncio.TimerHandle | None = None
        self._write: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        # Whether a body is to come, and the bytes since its latest part: framing and trailers.
        self._awaits_body = False
        self._framing_bytes = 0
        self._late: asyncio.TimerHandle | None = None
        self._late_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        for timer in (self._head, self._write, self._late):
            _cancelled(timer)
        self._head = self._write = self._late = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._head_bytes += len(data)
        self._framing_bytes += len(data)
        super().data_received(data)
        if self._head is not None and self._head_bytes > MAX_HEAD_BYTES:
            self.transport.abort()
        if self._awaits_body and self._framing_bytes > MAX_FRAMING_BYTES:
            self.transport.abort()
        if self._late is not None:
            self._late_bytes += len(data)
            if self._late_bytes > MAX_LATE_BYTES:
                # The timer goes on, for an answer that is not taken.
                self.transport.close()

    def on_message_begin(self) -> None:
        """The first byte of a request has come."""
        super().on_message_begin()
        self._await_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header has come; trailers, which come after a body, are dropped.

        They must not change what was decided by the head, such as whose request it is.
        """
        if not self._awaits_body:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """A part of a body has come."""
        self._framing_bytes = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """The head of a request has come."""
        self._awaits_body = True
        self._framing_bytes = 0
        self._head = _cancelled(self._head)
        self._take_host_of_target()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The end of a request has come."""
        self._awaits_body = False
        super().on_message_complete()
        if self._late is not None:
            self._late = _cancelled(self._late)
            self._await_head()

    def on_response_complete(self) -> None:
        """An answer has been written."""
        super().on_response_complete()
        # The last request of the connection; of those before it all has come.
        if self.cycle.response_complete and self.cycle.more_body:
            self._late_bytes = 0
            seconds = min(MAX_LATE_S, self._timeout_s or MAX_LATE_S)
            self._late = self.loop.call_later(seconds, self.transport.abort)

    def pause_writing(self) -> None:
        """More is written than the client has taken."""
        super().pause_writing()
        self._watch_write(None)

    def resume_writing(self) -> None:
        """The client has taken most of it."""
        self._write = _cancelled(self._write)
        super().resume_writing()

    def _watch_write(self, unsent_before: int | None) -> None:
        """Look again after the timeout; abort if nothing was taken since."""
        unsent = self.transport.get_write_buffer_size()
        if unsent_before is not None and unsent >= unsent_before:
            self.transport.abort()
        elif self._timeout_s:
            _cancelled(self._write)
            self._write = self.loop.call_later(self._timeout_s, self._watch_write, unsent)

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
