"""Servers of images for tests, and a network that leads to them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import httpcore2

TLS = Path(__file__).parent / "tls"
PUBLIC, OTHER_PUBLIC = "93.184.216.34", "2606:2800:220:1::1"

Writer = asyncio.StreamWriter
#: ``Answer``: writes to a client what a path gets.
Answer = Callable[[Writer], Awaitable[None]]


class ImageServer:
    """Answers paths; ``requests`` are the heads of what was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.requests: list[str] = []
        self.port = 0
        self.num_closed = 0

    def add(self, path: str, body: bytes = b"", status: str = "200 OK", **headers: str) -> None:
        """Answer a path with a body whose length is said, unless a header says another."""
        head = {"content_length": str(len(body)), **headers}
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in head.items())
        self.add_raw(path, f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body)

    def add_raw(self, path: str, answer: bytes) -> None:
        """Answer a path with these bytes."""

        async def write(writer: Writer) -> None:
            writer.write(answer)
            await writer.drain()

        self.answers[path] = write

    async def serve(self, reader: asyncio.StreamReader, writer: Writer) -> None:
        """Answer one request."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head)
            await self.answers[head.split()[1]](writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.num_closed += 1
            writer.close()


@asynccontextmanager
async def serving(*, tls: bool = False) -> AsyncGenerator[ImageServer]:
    """Provide a server that listens on this machine."""
    images = ImageServer()
    context = None
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(TLS / "certificate.pem", TLS / "key.pem")
    server = await asyncio.start_server(images.serve, "127.0.0.1", 0, ssl=context)
    images.port = server.sockets[0].getsockname()[1]
    try:
        yield images
    finally:
        server.close()


class Network(httpcore2.AsyncNetworkBackend):
    """Leads connections to public addresses to a server of this machine, and records them."""

    def __init__(self, port: int, *, silent: Sequence[str] = ()) -> None:
        self._port = port
        self._silent = silent
        self._network = cast("httpcore2.AsyncNetworkBackend", httpcore2.AnyIOBackend())
        self.connections: list[tuple[str, int]] = []

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the interface has it.
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """See ``AsyncNetworkBackend``."""
        self.connections.append((host, port))
        if host in self._silent:
            raise httpcore2.ConnectError("refused")
        return await self._network.connect_tcp(
            "127.0.0.1", self._port, timeout, local_address, socket_options
        )


class Names:
    """A resolver; each name has a list of answers, of which the last one stays."""

    def __init__(self, names: Mapping[str, Sequence[Sequence[str]]] | None = None) -> None:
        self._names = {name: list(answers) for name, answers in (names or {}).items()}
        self.asked_names: list[str] = []

    async def __call__(self, name: str, port: int) -> Sequence[str]:
        self.asked_names.append(name)
        answers = self._names.get(name, [[PUBLIC]])
        return answers.pop(0) if len(answers) > 1 else answers[0]
