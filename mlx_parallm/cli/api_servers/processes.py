"""The HTTP processes of a server: their lives, and which of them gets a connection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_parallm.conversations.records import KeepsChats
from mlx_parallm.engine.commands import Stop
from mlx_parallm.engine.core import EngineCore
from mlx_parallm.engine.parallel.member import delay_after
from mlx_parallm.peers.connections import ConnectionPipe, Handover
from mlx_parallm.peers.launch import launch
from mlx_parallm.peers.messages import Closed, Counted, Leave, Ready, StartHttp
from mlx_parallm.peers.requests import Catalogs, HttpPeer, Shared
from mlx_parallm.peers.wire import Wire

logger = logging.getLogger(__name__)

# SETTLE_TIMEOUT_S: an HTTP process that does not take messages for this long is killed.
SETTLE_TIMEOUT_S = 10.0
# PING_INTERVAL_S, PING_TIMEOUT_S: a process that hangs keeps the connections that it was given, so
# each is asked from time to time whether it still takes messages, and killed if it does not.
PING_INTERVAL_S, PING_TIMEOUT_S = 10.0, 30.0
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


@dataclass(slots=True, eq=False)
class _Process:
    """One HTTP process.

    Attributes:
        child: the process.
        wire: messages.
        pipe: connections.
        host: its requests.
        num_connections: those that it was given and that are there.
        ended: set once it is gone.
        ready: set once it takes connections, or is gone.
    """

    child: subprocess.Popen[bytes]
    wire: Wire
    pipe: ConnectionPipe
    peer: HttpPeer
    num_connections: int = 0
    is_ready: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    ready: asyncio.Event = field(default_factory=asyncio.Event)


class HttpProcesses:
    """Starts the HTTP processes, and starts those that die anew. Lives on the event loop.

    Connections go to the process that has the fewest. While none is there, this process serves
    them itself.
    """

    def __init__(
        self,
        core: EngineCore,
        start: StartHttp,
        command: Sequence[str],
        *,
        shared: Shared,
        adopt: Handover,
        count: Callable[[Mapping[Any, float]], None] = lambda counts: None,
        keep_chat: KeepsChats | None = None,
        restart_delay_s: Callable[[int], float] | None = None,
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            core: the engines.
            start: how the processes are set up.
            command: starts one; its last two arguments are descriptors.
            shared: what applications share.
            adopt: serves a connection in this process.
            count: takes what the processes have answered.
            keep_chat: stores chats that the processes have answered; None: none are stored.
            restart_delay_s: returns the seconds to wait after so many earlier deaths in a row.
        """
        self._restart_delay_s = restart_delay_s or delay_after
        self._core = core
        self._start = start
        self._command = command
        self._catalogs = Catalogs(core, shared)
        self._adopt = adopt
        self._count = count
        self._keep_chat = keep_chat
        self._processes: list[_Process] = []
        self._lives: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self._turn = 0
        self._is_showing = False

    @property
    def are_serving(self) -> bool:
        """True if one of them takes connections."""
        return any(process.is_ready for process in self._processes)

    async def start(self) -> None:
        """Start all of them, and return once each takes connections or has failed to."""
        self._core.control.announce = self.settle
        loop = asyncio.get_running_loop()
        self._core.directory.on_moved(partial(self._show_soon, loop))
        first = [asyncio.Event() for _ in range(self._start.num_processes)]
        self._lives = [loop.create_task(self._live(event)) for event in first]
        for event in first:
            await event.wait()

    def give(self, connection: socket.socket, head: bytes) -> None:
        """Let a process serve a connection, of which ``head`` has been read."""
        ready = [process for process in self._processes if process.is_ready]
        if not ready:
            self._adopt(connection, head)
            return
        self._turn += 1
        # Those with as many connections take turns.
        order = ready[self._turn % len(ready) :] + ready[: self._turn % len(ready)]
        process = min(order, key=lambda each: each.num_connections)
        process.num_connections += 1
        process.pipe.send(connection, head)

    def leave(self, message: Leave) -> None:
        """Let connections end; see ``Leave``."""
        for process in self._processes:
            process.wire.send(message)

    async def settle(self) -> None:
        """Return once every process knows the models and adapters as they are now."""
        await asyncio.gather(
            *(self._settle(process, SETTLE_TIMEOUT_S) for process in self._processes)
        )

    def _show_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let every process know of models that were loaded or evicted, or load; on any thread."""
        # Several changes of a moment go out together, and a loop that is closed has no processes.
        if not self._is_showing:
            self._is_showing = True
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._show)

    def _show(self) -> None:
        self._is_showing = False
        for process in self._processes:
            if process.is_ready:
                process.peer.show()

    async def stop(self, timeout_s: float) -> None:
        """End all of them: they get some time to write what has been answered."""
        self._stopping.set()
        for process in self._processes:
            process.wire.send(Stop())
        for process in list(self._processes):
            try:
                await asyncio.wait_for(process.ended.wait(), timeout_s)
            except TimeoutError:
                process.child.kill()
        await asyncio.gather(*self._lives)

    def _peer(self, wire: Wire) -> HttpPeer:
        return HttpPeer(self._core, wire, self._catalogs, self._keep_chat)

    async def _watch(self, process: _Process) -> None:
        """Kill a process that hangs, from the time when it takes connections."""
        await process.ready.wait()
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            await self._settle(process, PING_TIMEOUT_S)

    async def _settle(self, process: _Process, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(process.peer.settle(), timeout_s)
        except TimeoutError:
            logger.warning("HTTP process %d does not answer; it is killed", process.child.pid)
            process.child.kill()

    async def _live(self, is_up: asyncio.Event) -> None:
        """Run one process after another, until the server stops."""
        num_deaths = 0
        while not self._stopping.is_set():
            if await self._live_once(is_up):
                num_deaths = 0
            delay_s = self._restart_delay_s(num_deaths)
            num_deaths += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def _live_once(self, is_up: asyncio.Event) -> bool:
        """Run one process until it has ended; return True if it took connections."""
        try:
            process = await self._spawn()
        except OSError as problem:
            logger.warning("an HTTP process cannot be started: %s", problem)
            is_up.set()
            return False
        watch = asyncio.get_running_loop().create_task(self._watch(process))
        try:
            await process.ready.wait()
            is_up.set()
            was_ready = process.is_ready
            await process.ended.wait()
        finally:
            watch.cancel()
            await self._bury(process)
        if not self._stopping.is_set():
            logger.error(
                "HTTP process %d ended with %s; another is started",
                process.child.pid,
                process.child.returncode,
            )
        return was_ready

    async def _spawn(self) -> _Process:
        child, (wire_end, pipe_end) = await asyncio.to_thread(launch, self._command, 2)
        box: list[_Process] = []

        def take(message: Any, number: int) -> None:
            self._take(box[0], message, number)

        def end() -> None:
            box[0].ended.set()
            box[0].ready.set()

        wire = Wire(take, end)
        pipe = ConnectionPipe(pipe_end, self._adopt, on_lost=lambda: None)
        box.append(_Process(child, wire, pipe, self._peer(wire)))
        self._processes.append(box[0])
        await wire.connect(wire_end)
        wire.send(self._start)
        box[0].peer.show()
        if self._stopping.is_set():
            # It was not there when the others were asked to stop.
            child.kill()
        return box[0]

    def _take(self, process: _Process, message: Any, number: int) -> None:
        match message:
            case Ready():
                process.is_ready = True
                process.peer.show()
                process.ready.set()
            case Closed():
                process.num_connections -= 1
            case Counted():
                self._count(message.counts)
            case _:
                known = process.peer.take(message, number)
                assert known, message

    async def _bury(self, process: _Process) -> None:
        process.is_ready = False
        self._processes.remove(process)
        process.pipe.close()
        process.wire.close()
        await process.peer.leave()
        process.child.kill()
        await asyncio.to_thread(process.child.wait)


class SettledMiddleware:
    """Answers a change once every HTTP process knows it.

    A client may name a new adapter on another connection, which another process serves.
    """

    def __init__(self, app: ASGIApp, processes: HttpProcesses) -> None:
        self._app = app
        self._processes = processes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS:
            await self._app(scope, receive, send)
            return

        async def send_settled(message: Message) -> None:
            if message["type"] == "http.response.start":
                await self._processes.settle()
            await send(message)

        await self._app(scope, receive, send_settled)
