"""The command ``mlx_parallm serve``, which serves until a signal or the engine's end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import uvloop
from fastapi import FastAPI
from starlette.types import ASGIApp
from typing_extensions import override

from mlx_parallm.api.app import answers_in_any_process, create_app
from mlx_parallm.api.http.auth import is_loopback
from mlx_parallm.api.http.connection import BoundedProtocol
from mlx_parallm.cli.api_servers.connections import (
    FLUSH_TIMEOUT_S,
    FORCE_TIMEOUT_S,
    ConnectionServer,
    UvicornServer,
    uvicorn_config,
)
from mlx_parallm.cli.api_servers.processes import HttpProcesses, SettledMiddleware
from mlx_parallm.cli.banner import banner
from mlx_parallm.cli.child_modules import SWITCH_INTERVAL_S
from mlx_parallm.cli.engines import open_engine, with_engine_count
from mlx_parallm.cli.logs import show, take_over_handlers
from mlx_parallm.cli.ranks import wait_for_launcher
from mlx_parallm.cli.watchdog import LONG_STEP_S, end_at_once, watching
from mlx_parallm.config import EngineConfig
from mlx_parallm.engine.life import END_TIMEOUT_S
from mlx_parallm.peers.launch import HTTP, ignore_signals, module_command
from mlx_parallm.peers.messages import Leave, StartHttp
from mlx_parallm.process_setup.device_process import prepare_device_process
from mlx_parallm.server_config import ServerConfig
from mlx_parallm.serving.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

# BACKLOG: connections that wait to be accepted.
BACKLOG = 2048
# ACCEPT_PAUSE_S: seconds until connections are accepted again, where no descriptor was left.
ACCEPT_PAUSE_S = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)
# HANGUP: a rank that mlx.launch started by ssh gets it when the connection ends.
HANGUP = signal.SIGHUP
# NOTICE_S: time from the engine's death to the server's end. Requests and /health are answered with
# 503 until then, so that proxies that poll it see more than refused connections.
NOTICE_S = 1.0
# LAST_REQUESTS_S: time that requests get to arrive on connections that were accepted last.
LAST_REQUESTS_S = 0.5
# STOP_TIMEOUT_S: time that HTTP processes get to end: connections may be flushed until then.
STOP_TIMEOUT_S = FLUSH_TIMEOUT_S + 5
# KILL_TIMEOUT_S: time that a killed engine gets to be gone.
KILL_TIMEOUT_S = 2.0
# STEP_CHECK_S: seconds between two looks at the step that the end of an engine waits for.
STEP_CHECK_S = 1.0


def follow(engine_config: EngineConfig) -> int:
    """Be a rank above 0, which ends when rank 0 does; return the exit status.

    Raises:
        ConfigError: this rank differs from rank 0, or cannot reach it.
    """
    # The launcher signals all ranks, or ssh hangs up. Rank 0 drains, then ends this one.
    ignore_signals()
    prepare_device_process()
    # This process has MLX, unlike one that speaks HTTP.
    from mlx_parallm.serving.build import follow_ranks  # noqa: PLC0415

    take_over_handlers()
    follow_ranks(engine_config)
    return 0


def serve(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    listeners: Sequence[socket.socket],
    *,
    has_launcher: bool = False,
) -> int:
    """Load the models and serve them until SIGTERM or SIGINT, or until the launcher is gone.

    Args:
        engine_config: what is served.
        server_config: how.
        listeners: are bound to the addresses; they are closed in the end.
        has_launcher: True if a launcher of ranks waits for this process.

    Returns:
        0 after a signal, 1 if the engine died.

    Raises:
        ConfigError: a setting does not fit a model.
        ModelLoadError: a model could not be loaded.
    """
    take_over_handlers()
    server_config = with_engine_count(server_config)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with contextlib.ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(listener)
        addresses = [listener.getsockname()[:2] for listener in listeners]
        host = widest_host([host for host, _ in addresses])
        warn_if_exposed(server_config, host)
        engine = open_engine(engine_config, server_config)
        engine.start()
        max_waiting = engine_config.scheduler.max_waiting
        server = EngineServer(
            engine, server_config, max_waiting, bound_to=host, has_launcher=has_launcher
        )
        logger.info(
            "serving %s on %s",
            ", ".join(name for status in engine.statuses() for name in status.names),
            " and ".join(
                f"http://{f'[{host}]' if ':' in host else host}:{port}" for host, port in addresses
            ),
        )
        show(banner(engine.statuses(), addresses, needs_key=bool(server_config.api_keys)))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(server.run(listeners))


def widest_host(hosts: Sequence[str]) -> str:
    """Return the address of a server's sockets that most others reach: no loopback, if any is."""
    return next((host for host in hosts if not is_loopback(host)), hosts[0])


def warn_if_exposed(config: ServerConfig, host: str) -> None:
    """Log a warning if other machines can reach the server without a key."""
    if is_exposed(config, host):
        logger.warning(
            "LISTENING ON %s WITHOUT AN API KEY: everyone who reaches this port can use the "
            "models and change the server. Set --api-key, or listen on 127.0.0.1.",
            host,
        )


def is_exposed(config: ServerConfig, host: str) -> bool:
    """True if other machines can reach a server bound to ``host`` without a key."""
    return not config.api_keys and not is_loopback(host)


class EngineServer:
    """An HTTP server and the engine behind it, which end together."""

    def __init__(
        self,
        engine: AsyncEngine,
        config: ServerConfig,
        max_waiting: int,
        *,
        bound_to: str,
        has_launcher: bool = False,
    ) -> None:
        self._engine = engine
        self._has_launcher = has_launcher
        self._config = config
        self._ending: asyncio.Task[None] | None = None
        # Set by a second signal.
        self._is_forced = asyncio.Event()
        app = self._app = create_app(engine, config, max_waiting=max_waiting, bound_to=bound_to)
        self._http = (
            _SharedHttp(app, engine, config, max_waiting, bound_to)
            if config.api_server_count > 1
            else _OwnHttp(app, config)
        )

    async def run(self, listeners: Sequence[socket.socket]) -> int:
        """Serve until a signal, and return 0, or until the engine's death, and return 1."""
        with watching(asyncio.get_running_loop(), self._engine.steps_s):
            return await self._serve(listeners)

    async def _serve(self, listeners: Sequence[socket.socket]) -> int:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        if self._engine.config.ranks.size > 1 and signal.getsignal(HANGUP) != signal.SIG_IGN:
            loop.add_signal_handler(HANGUP, self._on_signal)
        threading.Thread(target=self._watch, args=(loop,), daemon=True).start()
        if self._has_launcher:
            threading.Thread(target=self._watch_launcher, args=(loop,), daemon=True).start()
        await self._http.run(listeners)
        if self._ending is not None:
            await asyncio.wait([self._ending])
        status = int(self._engine.ended.is_set())
        # Even after its death, the engine's thread may still be ending.
        await self._stop_engine(status)
        return status

    async def _stop_engine(self, status: int) -> None:
        """Stop the engine; end this process without it if it hangs on a thread of this one.

        A step may take long, so it is waited for up to ``LONG_STEP_S``. The loop turns meanwhile,
        so that a second signal can make it short.

        Args:
            status: the exit status if a second signal ends the process before the step has ended.
        """
        stopping = asyncio.ensure_future(asyncio.to_thread(self._engine.stop))
        forced = asyncio.ensure_future(self._is_forced.wait())
        patience_s, hangs = END_TIMEOUT_S + KILL_TIMEOUT_S, False
        while not (stopping.done() or forced.done() or hangs):
            await asyncio.wait(
                {stopping, forced}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
            )
            patience_s, hangs = STEP_CHECK_S, self._has_long_step()
        if forced.done():
            self._engine.stop_within(FORCE_TIMEOUT_S)
            await asyncio.wait({stopping}, timeout=FORCE_TIMEOUT_S + KILL_TIMEOUT_S)
            hangs = self._has_long_step()
        forced.cancel()
        if stopping.done():
            return
        if hangs:
            logger.critical("the engine hangs; the server ends without it")
        else:
            logger.warning("the step in flight did not end; the server ends without it")
        end_at_once(1 if hangs else status)

    def _has_long_step(self) -> bool:
        return max(self._engine.steps_s(), default=0.0) >= LONG_STEP_S

    def _on_signal(self) -> None:
        if self._ending is None:
            delay_s, timeout_s = self._config.shutdown_delay_s, self._config.shutdown_timeout_s
            if delay_s:
                logger.info("/ready and /health answer 503; requests are served for %gs", delay_s)
            logger.info("shutting down: running requests have %gs to finish", timeout_s)
            self._ending = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._ending.cancel()
            self._is_forced.set()
            self._http.uvicorn.should_exit = self._http.uvicorn.force_exit = True

    async def _drain(self) -> None:
        delay_s = self._config.shutdown_delay_s
        self._http.leave()
        if delay_s:
            self._app.state.is_leaving = True
            await asyncio.sleep(delay_s)
            self._http.stop_listening()
            await asyncio.sleep(LAST_REQUESTS_S)
            self._http.close_idle()
        await self._engine.drain(self._config.shutdown_timeout_s)
        self._http.uvicorn.should_exit = True

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for the engine's end on a thread of its own, then notify the event loop."""
        self._engine.ended.wait()
        # The loop may be closed by then.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._on_engine_end)

    def _watch_launcher(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for the launcher's end on a thread of its own, then notify the event loop."""
        wait_for_launcher()
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._on_launcher_end)

    def _on_launcher_end(self) -> None:
        # A supervisor signals the launcher and the ranks: a second signal would end requests.
        if self._ending is None:
            logger.warning("the launcher is gone; the server ends too")
            self._on_signal()

    def _on_engine_end(self) -> None:
        logger.critical("the engine has ended; the server ends too")
        asyncio.get_running_loop().call_later(NOTICE_S, self._end_http)

    def _end_http(self) -> None:
        self._http.uvicorn.should_exit = True


class _OwnHttp:
    """HTTP in this process."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        protocol = partial(BoundedProtocol, timeout_s=config.client_timeout_s)
        self.uvicorn = UvicornServer(uvicorn_config(app, config, protocol))

    async def run(self, listeners: Sequence[socket.socket]) -> None:
        """Serve until ``uvicorn.should_exit``."""
        await self.uvicorn.serve(sockets=list(listeners))

    def leave(self) -> None:
        """Have each connection end with an answer, so that its client connects anew elsewhere."""
        self.uvicorn.leave()

    def stop_listening(self) -> None:
        """Refuse connections; those that are there are served."""
        self.uvicorn.stop_listening()

    def close_idle(self) -> None:
        """Close connections without a request."""
        self.uvicorn.close_idle()


class _SharedHttp(_OwnHttp):
    """HTTP in processes of ``--api-server-count``, and in this one what they do not answer."""

    def __init__(
        self,
        app: FastAPI,
        engine: AsyncEngine,
        config: ServerConfig,
        max_waiting: int,
        bound_to: str,
    ) -> None:
        count = config.api_server_count
        # A client's bodies are bounded in each process.
        share = replace(config, max_client_body_bytes=config.max_client_body_bytes // count)
        self._processes = HttpProcesses(
            engine,
            StartHttp(engine.config, share, max_waiting, bound_to, count),
            module_command(HTTP, config),
            shared=app.state.policies,
            adopt=self._adopt,
            count=app.state.counts.add,
            keep_chat=app.state.keep_chat,
        )
        answers = answers_in_any_process()
        self._connections = ConnectionServer(
            SettledMiddleware(app, self._processes),
            config,
            serves=lambda method, path: not (self._processes.are_serving and answers(method, path)),
            hand_over=self._processes.give,
        )
        self.uvicorn = self._connections.uvicorn
        self._is_listening = True
        self._listeners: Sequence[socket.socket] = ()

    async def run(self, listeners: Sequence[socket.socket]) -> None:
        """Serve until ``uvicorn.should_exit``."""
        loop = asyncio.get_running_loop()
        serving = loop.create_task(self._connections.run())
        await self._processes.start()
        self._listeners = listeners
        for listener in listeners:
            listener.setblocking(False)
            listener.listen(BACKLOG)
            loop.add_reader(listener, self._accept, listener)
        await serving
        self.stop_listening()
        await self._processes.stop(0 if self.uvicorn.force_exit else STOP_TIMEOUT_S)

    @override
    def leave(self) -> None:
        super().leave()
        self._processes.leave(Leave())

    @override
    def close_idle(self) -> None:
        super().close_idle()
        self._processes.leave(Leave(is_over=True))

    @override
    def stop_listening(self) -> None:
        self._is_listening = False
        listeners, self._listeners = self._listeners, ()
        for listener in listeners:
            # A connection in the backlog would be reset.
            self._accept(listener)
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(BACKLOG):
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as problem:
                # Too many open files, or a client that is gone already.
                logger.warning("a connection cannot be accepted: %s", problem.strerror)
                self._pause_accepting(listener)
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._processes.give(connection, b"")

    def _pause_accepting(self, listener: socket.socket) -> None:
        """Leave connections in the backlog for a while: the loop would be called at once again."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)

        def go_on() -> None:
            if self._is_listening:
                loop.add_reader(listener, self._accept, listener)

        loop.call_later(ACCEPT_PAUSE_S, go_on)

    def _adopt(self, connection: socket.socket, head: bytes) -> None:
        self._connections.adopt(connection, head)
