"""``mlx_parallm serve``: loads the models, then answers HTTP until a signal or the engine's end."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import uvicorn
import uvloop

from mlx_parallm.api.app import create_app
from mlx_parallm.api.connection import BoundedProtocol
from mlx_parallm.api.hosts import is_loopback
from mlx_parallm.api.listener import bind, inherit
from mlx_parallm.cli import engine_process
from mlx_parallm.cli.configure import read_settings, warn_of_unknown_variables
from mlx_parallm.cli.logs import configure_logging
from mlx_parallm.cli.progress import progress_shown
from mlx_parallm.config import EngineConfig, ServerConfig
from mlx_parallm.engine.remote.life import RemoteLife
from mlx_parallm.serving.async_engine import AsyncEngine

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Connections get this long to take what was written before they are closed.
FLUSH_TIMEOUT_S = 5


def run(args: argparse.Namespace) -> int:
    """Serve what the arguments, the environment and the configuration file say."""
    engine_config, server_config = read_settings(args)
    if server_config.data_dir is None:
        server_config = replace(server_config, data_dir=default_data_dir(os.environ, sys.platform))
    return serve(engine_config, server_config)


def default_data_dir(environment: Mapping[str, str], platform: str) -> str:
    """Where a program of this user keeps its data (XDG Base Directory; Apple's guidelines)."""
    if platform == "darwin":
        return str(Path.home() / "Library" / "Application Support" / "mlx_parallm")
    data = environment.get("XDG_DATA_HOME", "")
    # A relative path there is to be ignored.
    home = Path(data) if data.startswith("/") else Path.home() / ".local" / "share"
    return str(home / "mlx_parallm")


def serve(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Load the models and serve them until SIGTERM or SIGINT.

    Returns:
        0 after a signal, 1 when the engine died.

    Raises:
        ConfigError: the address cannot be used, or what loading raised.
        ModelLoadError: a model could not be loaded.
    """
    configure_logging(server_config.log_level, server_config.log_format)
    warn_of_unknown_variables()
    sys.setswitchinterval(engine_process.SWITCH_INTERVAL_S)
    # Taken before the models load, so that a port in use is known at once.
    with open_listener(server_config) as listener:
        host, port = listener.getsockname()[:2]
        warn_if_exposed(server_config, host)
        engine = open_engine(engine_config, server_config)
        engine.start()
        max_waiting = engine_config.scheduler.max_waiting
        server = EngineServer(engine, server_config, max_waiting, bound_to=host)
        served = (*engine.models(), *engine.encoders.models())
        logger.info(
            "serving %s on http://%s:%d",
            ", ".join(name for one in served for name in one.names),
            f"[{host}]" if ":" in host else host,
            port,
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(server.run(listener))


def open_engine(engine_config: EngineConfig, server_config: ServerConfig) -> AsyncEngine:
    """The engine, in this process or in its own; nothing is loaded yet."""
    on_progress = progress_shown()
    if not server_config.engine_process:
        return AsyncEngine(engine_config, on_progress=on_progress)
    life = RemoteLife(engine_config, engine_process.command(server_config), on_progress)
    return AsyncEngine(engine_config, life=life)


def open_listener(config: ServerConfig) -> socket.socket:
    """The socket to serve on, which does not listen yet; raises ConfigError if there is none."""
    if config.fd is not None:
        return inherit(config.fd)
    return bind(config.host, config.port)


def warn_if_exposed(config: ServerConfig, host: str) -> None:
    """Log it if other machines can reach the server, bound to this address, without a key."""
    if is_exposed(config, host):
        logger.warning(
            "LISTENING ON %s WITHOUT AN API KEY: anybody who reaches this port can use the "
            "models and change the server. Set --api-key, or listen on 127.0.0.1.",
            host,
        )


def is_exposed(config: ServerConfig, host: str) -> bool:
    """Whether other machines can reach the server, bound to this address, without a key."""
    return not config.api_keys and not is_loopback(host)


class UvicornServer(uvicorn.Server):
    """A server that leaves signals to its owner: uvicorn would raise them again at the end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing."""
        yield


class EngineServer:
    """An HTTP server and the engine behind it, which end together."""

    def __init__(
        self, engine: AsyncEngine, config: ServerConfig, max_waiting: int, *, bound_to: str
    ) -> None:
        self._engine = engine
        self._config = config
        self._ending: asyncio.Task[None] | None = None
        self._server = UvicornServer(
            uvicorn.Config(
                create_app(engine, config, max_waiting=max_waiting, bound_to=bound_to),
                http=partial(BoundedProtocol, timeout_s=config.client_timeout_s),  # type: ignore[arg-type]
                log_config=None,
                # The application writes its own.
                access_log=False,
                root_path=config.root_path,
                server_header=False,
                timeout_graceful_shutdown=FLUSH_TIMEOUT_S,
            )
        )

    async def run(self, listener: socket.socket) -> int:
        """Serve until a signal (0) or the engine's death (1)."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        threading.Thread(target=self._watch, args=(loop,), daemon=True).start()
        await self._server.serve(sockets=[listener])
        if self._ending is not None:
            await asyncio.wait([self._ending])
        has_died = self._engine.ended.is_set()
        # Even then: its thread may still be ending.
        self._engine.stop()
        return int(has_died)

    def _on_signal(self) -> None:
        if self._ending is None:
            logger.info("shutting down: running requests have %gs", self._config.shutdown_timeout_s)
            self._ending = asyncio.get_running_loop().create_task(self._drain())
        else:
            self._ending.cancel()
            self._server.should_exit = self._server.force_exit = True

    async def _drain(self) -> None:
        await self._engine.drain(self._config.shutdown_timeout_s)
        self._server.should_exit = True

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """On a thread of its own: wait for the engine's end."""
        self._engine.ended.wait()
        # The loop may be gone by then, and with it everybody to tell.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(self._on_engine_end)

    def _on_engine_end(self) -> None:
        logger.critical("the engine has ended; so does the server")
        self._server.should_exit = True
