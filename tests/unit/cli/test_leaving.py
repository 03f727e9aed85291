"""Connections of a server that leaves: none is kept for a request that would be refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

import pytest
from starlette.types import Receive, Scope, Send

from mlx_parallm.api.http.connection import BoundedProtocol
from mlx_parallm.api.http.listener import bind
from mlx_parallm.cli.api_servers.connections import UvicornServer, uvicorn_config
from mlx_parallm.server_config import ServerConfig

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Leaving:
    """A server whose answers wait for ``may_answer``."""

    def __init__(self) -> None:
        self.may_answer, self.has_request = asyncio.Event(), asyncio.Event()
        protocol = partial(BoundedProtocol, timeout_s=0)  # time limit: none
        self.uvicorn = UvicornServer(uvicorn_config(self, ServerConfig(), protocol))
        self.listener = bind("127.0.0.1", 0)
        self.writers: set[asyncio.StreamWriter] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        self.has_request.set()
        await self.may_answer.wait()
        length = (b"content-length", b"2")
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def ask(self, ends: Ends | None = None) -> Ends:
        """Send a request, on a new connection by default."""
        reader, writer = ends or await asyncio.open_connection(*self.listener.getsockname())
        self.writers.add(writer)
        self.has_request.clear()
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await self.has_request.wait()
        return reader, writer


@pytest.fixture
async def server() -> AsyncIterator[Leaving]:
    server = Leaving()
    serving = asyncio.create_task(server.uvicorn.serve(sockets=[server.listener]))
    await server.uvicorn.is_up.wait()
    yield server
    server.may_answer.set()
    server.uvicorn.should_exit = True
    await serving
    for writer in server.writers:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def answer(ends: Ends) -> bytes:
    return await ends[0].readuntil(b"ok")


async def test_answers_end_their_connections(server: Leaving) -> None:
    kept, busy = await server.ask(), await server.ask()
    server.may_answer.set()
    assert b"connection: close" not in await answer(kept)
    await answer(busy)
    server.may_answer.clear()
    await server.ask(busy)
    # Each second has headers of its own; a request keeps those of its beginning.
    await server.uvicorn.on_tick(0)
    server.uvicorn.leave()
    server.may_answer.set()
    for ends in (busy, await server.ask(kept), await server.ask()):
        assert b"connection: close" in await answer(ends)
        assert await ends[0].read() == b""


async def test_idle_connections_end_and_busy_ones_do_not(server: Leaving) -> None:
    idle = await server.ask()
    server.may_answer.set()
    await answer(idle)
    server.may_answer.clear()
    busy = await server.ask()
    server.uvicorn.leave()
    server.uvicorn.close_idle()
    assert await idle[0].read() == b""
    assert not busy[0].at_eof()
    server.may_answer.set()
    assert b"200 OK" in await answer(busy)
