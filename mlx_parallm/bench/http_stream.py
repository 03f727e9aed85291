"""A minimal HTTP/1.1 client that reads a response body as it arrives.

The load client shares the machine with the server it measures, so it speaks just enough HTTP on
asyncio streams: one connection per request, bodies framed by ``Content-Length``, by
``Transfer-Encoding: chunked`` or by the end of the connection (RFC 9112, section 6).
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

READ_SIZE = 65536
MAX_HEAD_SIZE = 65536


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


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Status and headers (names in lower case) of a response."""

    status: int
    headers: Mapping[str, str]

    @classmethod
    def parse(cls, head: bytes) -> ResponseHead:
        """Parse the bytes up to the empty line.

        Raises:
            ResponseError: they are no HTTP/1 response.
        """
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            raise ResponseError(f"this is not an HTTP response: {first[:80]!r}")
        pairs = (line.partition(":") for line in lines if line)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        return cls(int(words[1]), headers)

    @property
    def is_chunked(self) -> bool:
        """True if the body comes in chunks."""
        return "chunked" in self.headers.get("transfer-encoding", "").lower()

    @property
    def content_length(self) -> int | None:
        """The body's length in bytes; None if the server does not send it."""
        value = self.headers.get("content-length")
        return int(value) if value is not None and value.isdigit() else None


class ChunkDecoder:
    """A decoder that removes the framing of a chunked body arriving in any pieces."""

    def __init__(self) -> None:
        self._buffer = b""
        self._remaining = 0
        self._in_data = False
        self.is_complete = False

    def feed(self, data: bytes) -> bytes:
        """Return the body bytes that ``data`` completes.

        Raises:
            ResponseError: a chunk's size is no hexadecimal number.
        """
        self._buffer += data
        body: list[bytes] = []
        while not self.is_complete and self._take(body):
            pass
        return b"".join(body)

    def _take(self, body: list[bytes]) -> bool:
        """Take one chunk's size or data from the buffer; False if more bytes must arrive."""
        if not self._in_data:
            line, line_end, rest = self._buffer.partition(b"\r\n")
            if not line_end:
                return False
            try:
                self._remaining = int(line.split(b";")[0], 16)
            except ValueError as error:
                raise ResponseError(f"this is not the size of a chunk: {line[:40]!r}") from error
            self._buffer = rest
            self._in_data = self._remaining > 0
            self.is_complete = self._remaining == 0
            return True
        # A line end follows the data and is taken with it.
        if len(self._buffer) < self._remaining + 2:
            return False
        body.append(self._buffer[: self._remaining])
        self._buffer = self._buffer[self._remaining + 2 :]
        self._in_data = False
        return True


class Response:
    """A response whose head has arrived; iterate over ``body`` once."""

    def __init__(self, head: ResponseHead, reader: asyncio.StreamReader) -> None:
        self.head = head
        self._reader = reader

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.head.status

    async def body(self) -> AsyncIterator[bytes]:
        """Yield pieces of the body as they arrive.

        Raises:
            ResponseError: the connection ended before the body did.
        """
        chunks = ChunkDecoder() if self.head.is_chunked else None
        remaining = None if chunks else self.head.content_length
        while not (chunks and chunks.is_complete) and remaining != 0:
            data = await self._reader.read(READ_SIZE)
            if not data:
                if chunks is None and remaining is None:
                    return
                raise ResponseError("the connection ended within the response")
            if remaining is not None:
                remaining -= min(len(data), remaining)
            piece = chunks.feed(data) if chunks else data
            if piece:
                yield piece

    async def read(self) -> bytes:
        """Return the whole body."""
        return b"".join([piece async for piece in self.body()])


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
        yield Response(await _read_head(reader), reader)
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


async def _read_head(reader: asyncio.StreamReader) -> ResponseHead:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        raise ResponseError("the connection ended before a response") from error
    except asyncio.LimitOverrunError as error:
        raise ResponseError("the response's head is too long") from error
    return ResponseHead.parse(head[:-4])
