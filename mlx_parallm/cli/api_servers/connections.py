"""An HTTP server of connections that were accepted elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from mlx_parallm.api.http.connection import BoundedProtocol
from mlx_parallm.api.http.handover import HandoverProtocol, Serves
from mlx_parallm.peers.connections import Handover
from mlx_parallm.server_config import ServerConfig

#: ``FLUSH_TIMEOUT_S``: time that connections get to read pending data before they are closed.
FLUSH_TIMEOUT_S = 5
#: ``FORCE_TIMEOUT_S``: time that requests and background work get to end after a second signal.
FORCE_TIMEOUT_S = 2
# CLOSE: the header of an answer after which its connection is closed.
CLOSE = (b"connection", b"close")


class UvicornServer(uvicorn.Server):
    """A server that leaves signals to its owner, because uvicorn would raise them again.

    Attributes:
        is_up: set once it serves.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        await super().startup(sockets)
        self.is_up.set()

    def stop_listening(self) -> None:
        """Refuse connections; those that are there are served."""
        for server in self.servers if self.is_up.is_set() else ():
            server.close()

    def leave(self) -> None:
        """Have each connection end with an answer, so that its client connects anew elsewhere."""
        for known in (self.config.encoded_headers, self.server_state.default_headers):
            known.append(CLOSE)
        for connection in self._of_http():
            if connection.is_busy:
                connection.shutdown()

    def close_idle(self) -> None:
        """Close connections without a request: the next one would be refused."""
        for connection in self._of_http():
            connection.shutdown()

    def _of_http(self) -> list[BoundedProtocol]:
        known = self.server_state.connections
        return [each for each in known if isinstance(each, BoundedProtocol)]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn; if the end is forced, requests end as if their clients had left.

        uvicorn would leave them, and the lifespan, to the end of the event loop, which cancels
        them; each would log a traceback.
        """
        await super().shutdown(sockets)
        if not self.force_exit:
            return
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if tasks := set(self.server_state.tasks):
            await asyncio.wait(tasks, timeout=FORCE_TIMEOUT_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.lifespan.shutdown(), FORCE_TIMEOUT_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Capture no signals."""
        yield


def uvicorn_config(
    app: ASGIApp, config: ServerConfig, protocol: Callable[..., object]
) -> uvicorn.Config:
    """Return uvicorn's settings; ``protocol`` makes the protocol of a connection."""
    return uvicorn.Config(
        app,
        http=protocol,  # type: ignore[arg-type]
        # A handshake is a request of HTTP, which is answered by an error.
        ws="none",
        log_config=None,
        # The application logs requests itself.
        access_log=False,
        root_path=config.root_path,
        server_header=False,
        timeout_graceful_shutdown=FLUSH_TIMEOUT_S,
    )


class ConnectionServer:
    """Serves connections that are given to it. Lives on the event loop.

    Attributes:
        uvicorn: the server; it listens nowhere.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        *,
        serves: Serves,
        hand_over: Handover,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare; see ``HandoverProtocol`` for the arguments."""
        self._on_closed = on_closed
        self._protocol = partial(
            HandoverProtocol,
            timeout_s=config.client_timeout_s,
            serves=serves,
            hand_over=hand_over,
            on_closed=on_closed,
        )
        self.uvicorn = UvicornServer(uvicorn_config(app, config, self._protocol))
        self._arriving: set[asyncio.Task[object]] = set()

    async def run(self) -> None:
        """Serve until ``uvicorn.should_exit``."""
        await self.uvicorn.serve(sockets=[])

    def adopt(self, connection: socket.socket, head: bytes) -> None:
        """Serve a connection, of which ``head`` has been read."""
        task = asyncio.get_running_loop().create_task(self._adopt(connection, head))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def _adopt(self, connection: socket.socket, head: bytes) -> None:
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.Protocol:
            return self._protocol(
                config=self.uvicorn.config,
                server_state=self.uvicorn.server_state,
                app_state=self.uvicorn.lifespan.state,
                _loop=loop,
                head=head,
            )

        try:
            connection.setblocking(False)
            await loop.connect_accepted_socket(protocol, connection)
        except OSError:
            # The client is gone already.
            connection.close()
            self._on_closed()
