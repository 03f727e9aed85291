"""A minimal HTTP/1.1 client that reads a response body as it arrives.

The load client shares the machine with the server it measures, so it speaks just enough HTTP on
asyncio streams, which httptools parses: one connection per request.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser

READ_SIZE = 65536
MAX_HEAD_SIZE = 65536
# LENGTH_HEADERS: say where a body ends; without them it ends with the connection.
LENGTH_HEADERS = (b"content-length", b"transfer-encoding")


class ResponseError(Exception):
    """The server's answer was no valid HTTP response, or was incomplete."""


@dataclass(frozen=True, slots=True)
class Target:
    """The address of a server; ``path`` precedes the route, such as ``/v1``."""

    host: str
    port: int
    path: str
    tls: bool

    @classmethod
    def from_url(cls, url: str) -> Target:
        """Parse ``http[s]://host[:port][/prefix][/v1]``.

        Raises:
            ValueError: the address has another scheme or no host.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http address")
        tls = parts.scheme == "https"
        port = parts.port or (443 if tls else 80)
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port, prefix.rstrip("/"), tls)


class Response:
    """A response whose head has arrived; iterate over ``body`` once.

    Methods that begin with ``on_`` are called by the parser.
    """

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._parser = HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._has_head = False
        self._has_length = False
        self._is_complete = False

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self._parser.get_status_code()

    async def read_head(self) -> None:
        """Return once the head has arrived.

        Raises:
            ResponseError: the answer is no HTTP response, or its head is too long.
        """
        size = 0
        while not self._has_head:
            if size > MAX_HEAD_SIZE:
                raise ResponseError("the response's head is too long")
            if not (more := await self._take()):
                raise ResponseError("the connection ended before a response")
            size += more

    async def body(self) -> AsyncIterator[bytes]:
        """Yield pieces of the body as they arrive.

        Raises:
            ResponseError: the connection ended before the body did, or a chunk is not as it must.
        """
        while True:
            if self._pieces:
                piece, self._pieces = b"".join(self._pieces), []
                yield piece
            if self._is_complete:
                return
            if not await self._take():
                if self._has_length:
                    raise ResponseError("the connection ended within the response")
                return

    async def read(self) -> bytes:
        """Return the whole body."""
        return b"".join([piece async for piece in self.body()])

    async def _take(self) -> int:
        """Parse what has arrived; return its number of bytes, 0 if the connection has ended."""
        data = await self._reader.read(READ_SIZE)
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            # What follows a complete response is not read.
            if not self._is_complete:
                raise ResponseError(f"this is not an HTTP response: {error}") from error
        return len(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note a header."""
        del value
        self._has_length |= name.lower() in LENGTH_HEADERS

    def on_headers_complete(self) -> None:
        """Note the end of the head."""
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        """Note the end of the body."""
        self._is_complete = True


@contextlib.asynccontextmanager
async def request(
    target: Target,
    method: str,
    path: str,
    *,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
) -> AsyncGenerator[Response]:
    """Send one request and yield the response; leaving the context closes the connection.

    Raises:
        OSError: the server cannot be reached, or the connection broke.
        ResponseError: the answer is no HTTP response.
    """
    context = ssl.create_default_context() if target.tls else None
    reader, writer = await asyncio.open_connection(target.host, target.port, ssl=context)
    try:
        writer.write(_request_head(target, method, path, len(body), headers or {}) + body)
        await writer.drain()
        response = Response(reader)
        await response.read_head()
        yield response
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _request_head(
    target: Target, method: str, path: str, length: int, headers: Mapping[str, str]
) -> bytes:
    fields = {
        "Host": f"{target.host}:{target.port}",
        "Connection": "close",
        "Content-Type": "application/json",
        "Content-Length": str(length),
        **headers,
    }
    lines = [f"{method} {target.path}{path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
