"""One HTTP process, ``python -m mlx_parallm.cli.api_servers.process``: it has no engine."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

import uvloop
from fastapi import FastAPI

from mlx_parallm.api.app import answers_in_any_process, create_request_app
from mlx_parallm.api.control.art.policies import ArtPolicies
from mlx_parallm.cli.api_servers.connections import ConnectionServer
from mlx_parallm.cli.child_modules import begin
from mlx_parallm.engine.commands import Stop
from mlx_parallm.peers.connections import ConnectionPipe
from mlx_parallm.peers.messages import (
    Catalog,
    Closed,
    Counted,
    Leave,
    Ready,
    StartHttp,
    find_remote_code,
)
from mlx_parallm.peers.wire import Wire
from mlx_parallm.process_setup.garbage import spare_garbage_collection
from mlx_parallm.serving.remote_client import RemoteClient

# ORPHANED: exit code of a process whose server is gone.
ORPHANED = 3
# COUNT_INTERVAL_S: seconds between two reports of what was answered; scrapes are no more frequent.
COUNT_INTERVAL_S = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer HTTP requests until the server sends stop, or is gone."""
    ends = begin(arguments)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(HttpProcess(*ends).run())
    return 0


class HttpProcess:
    """Serves the connections that come from the server's first process."""

    def __init__(self, wire_end: socket.socket, pipe_end: socket.socket) -> None:
        """``wire_end`` carries messages, ``pipe_end`` connections."""
        self._wire_end = wire_end
        self._pipe_end = pipe_end
        self._wire = Wire(self._take, on_lost=_end_at_once)
        self._engine: RemoteClient | None = None
        self._app: FastAPI | None = None
        self._connections: ConnectionServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Serve until the server sends stop."""
        await self._wire.connect(self._wire_end)
        await self._stopped.wait()
        if self._connections is not None and self._serving is not None:
            self._connections.uvicorn.should_exit = True
            await self._serving

    def _take(self, message: Any, number: int) -> None:
        match message:
            case StartHttp():
                self._set_up(message)
            case Stop():
                self._stopped.set()
            case Leave(is_over) if self._connections is not None:
                uvicorn = self._connections.uvicorn
                uvicorn.close_idle() if is_over else uvicorn.leave()
            case _:
                assert self._engine is not None, "the first message starts"
                known = self._engine.take(message, number)
                assert known, message
                if isinstance(message, Catalog) and self._serving is None:
                    self._serving = asyncio.get_running_loop().create_task(self._serve())

    def _set_up(self, start: StartHttp) -> None:
        find_remote_code(start.engine_config)
        pipe = ConnectionPipe(
            self._pipe_end, self._adopt, on_lost=_end_at_once, on_dropped=self._note_closed
        )
        policies = ArtPolicies()
        self._engine = RemoteClient(start, self._wire, policies.replace)
        app = self._app = create_request_app(
            self._engine,
            start.server_config,
            max_waiting=start.max_waiting,
            bound_to=start.bound_to,
            policies=policies,
            keep_chat=self._engine.keep_chat if start.server_config.data_dir else None,
        )
        self._connections = ConnectionServer(
            app,
            start.server_config,
            serves=answers_in_any_process(),
            hand_over=pipe.send,
            on_closed=self._note_closed,
        )

    async def _serve(self) -> None:
        assert self._connections is not None
        serving = asyncio.get_running_loop().create_task(self._connections.run())
        await self._connections.uvicorn.is_up.wait()
        spare_garbage_collection()
        self._wire.send(Ready())
        counting = asyncio.get_running_loop().create_task(self._count())
        await serving
        counting.cancel()

    async def _count(self) -> None:
        """Report what was answered, from time to time."""
        assert self._app is not None, "it is set up"
        while True:
            await asyncio.sleep(COUNT_INTERVAL_S)
            counts = self._app.state.counts.take()
            if counts:
                self._wire.send(Counted(counts))

    def _note_closed(self) -> None:
        self._wire.send(Closed())

    def _adopt(self, connection: socket.socket, head: bytes) -> None:
        assert self._connections is not None, "connections come once it is ready"
        self._connections.adopt(connection, head)


def _end_at_once() -> None:
    """End without the server, whose process is gone."""
    os._exit(ORPHANED)


if __name__ == "__main__":
    sys.exit(main())
